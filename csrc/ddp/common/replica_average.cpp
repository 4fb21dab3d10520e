#include "ddp/common/replica_average.h"

#include <cmath>
#include <initializer_list>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include "c10d/fault/fault_points.h"
#include "c10d/threads/outstanding_averages.h"
#include "ddp/common/buffer_mean.h"

namespace torchext {
namespace {

constexpr std::size_t kFrozenBucketBytes = std::size_t{16} << 20U;

std::vector<const FlatBucket*> bucketsOf(std::initializer_list<const FlatBuckets*> parts) {
  std::vector<const FlatBucket*> buckets;
  for (const FlatBuckets* part : parts) {
    for (std::size_t i = 0; i < part->size(); ++i) {
      buckets.push_back(&(*part)[i]);
    }
  }
  return buckets;
}

}  // namespace

ReplicaAverage::ReplicaAverage(AttachableBackend& group, const FlatBuckets& parameters, const FlatBuckets& buffers,
                               FrozenParameters frozen)
    : group_(group),
      frozen_(std::move(frozen)),
      trained_(bucketsOf({&parameters, &buffers})),
      parameter_buckets_(parameters.size()) {}

// Collective. Which buckets are averaged this time.
void ReplicaAverage::meet() {
  const InternalCollective internal;
  const std::vector<at::Tensor> differing = frozen_.differing(group_);
  differing_ = differing.empty() ? nullptr : std::make_unique<FlatBuckets>(differing, kFrozenBucketBytes);
  buckets_ = trained_;
  if (differing_) {
    const auto more = bucketsOf({differing_.get()});
    buckets_.insert(buckets_.end(), more.begin(), more.end());
  }
}

double ReplicaAverage::average() {
  RECORD_FUNCTION("torchext::exact_average", std::vector<c10::IValue>{});
  const InternalCollective internal;
  double distance = 0.0;
  double norm = 0.0;
  for (std::size_t i = 0; i < buckets_.size(); ++i) {
    const FlatBucket& current = *buckets_[i];
    const at::Tensor& transfer_buffer = current.transfer_buffer;
    const bool trained = i < parameter_buckets_;
    faultPoint(FaultPoint::kExactAverage);
    current.pack();
    const at::Tensor local = trained ? transfer_buffer.clone() : at::Tensor();
    std::vector<at::Tensor> tensors{!trained                             ? toSum(transfer_buffer)
                                    : transfer_buffer.element_size() < 4 ? transfer_buffer.to(at::kFloat)
                                                                         : transfer_buffer};
    group_.allreduce(tensors, c10d::AllreduceOptions())->wait();
    if (trained) {
      transfer_buffer.copy_(tensors.front().div_(group_.getSize()));
      distance += std::pow(at::norm(local.sub_(transfer_buffer).to(at::kDouble)).item<double>(), 2);
      norm += std::pow(at::norm(transfer_buffer.to(at::kDouble)).item<double>(), 2);
    } else {
      toMean(tensors.front(), group_.getSize(), transfer_buffer);
    }
    current.unpack(1.0);
  }
  return norm > 0 ? std::sqrt(distance / norm) : 0.0;
}

double ReplicaAverage::form() {
  const at::NoGradGuard no_grad;
  meet();
  const double distance = average();
  differing_ = nullptr;
  return distance;
}

void ReplicaAverage::checkNotEntered() const {
  TORCH_CHECK(local_values_.empty(), group_.getBackendName(), ": averaged() inside averaged()");
}

double ReplicaAverage::enter() {
  const at::NoGradGuard no_grad;
  meet();
  std::vector<at::Tensor> local;
  for (const FlatBucket* current : buckets_) {
    current->pack();
    local.push_back(current->transfer_buffer.clone());
  }
  local_values_ = std::move(local);
  try {
    return average();
  } catch (...) {
    leave();  // or some tensors would be averages, and others not
    throw;
  }
}

void ReplicaAverage::leave() {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < local_values_.size(); ++i) {
    buckets_[i]->transfer_buffer.copy_(local_values_[i]);
    buckets_[i]->unpack(1.0);
  }
  local_values_.clear();
  differing_ = nullptr;
}

}  // namespace torchext
