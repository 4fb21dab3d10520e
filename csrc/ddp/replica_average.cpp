#include "ddp/replica_average.h"

#include <cmath>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include "c10d/promises.h"
#include "ddp/buffer_mean.h"

namespace torchext {

ReplicaAverage::ReplicaAverage(AttachableBackend& group, const FlatBuckets& parameters, const FlatBuckets& buffers)
    : group_(group), parameter_buckets_(parameters.size()) {
  for (const FlatBuckets* part : {&parameters, &buffers}) {
    for (std::size_t i = 0; i < part->size(); ++i) {
      buckets_.push_back(&(*part)[i]);
    }
  }
}

double ReplicaAverage::form() {
  RECORD_FUNCTION("torchext::exact_average", std::vector<c10::IValue>{});
  const at::NoGradGuard no_grad;
  const InternalCollective internal;
  double distance = 0.0;
  double norm = 0.0;
  for (std::size_t i = 0; i < buckets_.size(); ++i) {
    const FlatBucket& current = *buckets_[i];
    const bool buffer = i >= parameter_buckets_;
    current.pack();
    const at::Tensor local = buffer ? at::Tensor() : current.wire.clone();
    std::vector<at::Tensor> tensors{buffer ? toSum(current.wire) : current.wire};
    group_.allreduce(tensors, c10d::AllreduceOptions())->wait();
    if (buffer) {
      toMean(tensors.front(), group_.getSize(), current.wire);
    } else {
      current.wire.div_(group_.getSize());
      distance += std::pow(at::norm(local.sub_(current.wire).to(at::kDouble)).item<double>(), 2);
      norm += std::pow(at::norm(current.wire.to(at::kDouble)).item<double>(), 2);
    }
    current.unpack(1.0);
  }
  return norm > 0 ? std::sqrt(distance / norm) : 0.0;
}

void ReplicaAverage::checkNotEntered() const {
  TORCH_CHECK(local_values_.empty(), group_.getBackendName(), ": averaged() inside averaged()");
}

double ReplicaAverage::enter() {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> local;
  for (const FlatBucket* current : buckets_) {
    current->pack();
    local.push_back(current->wire.clone());
  }
  const double distance = form();
  local_values_ = std::move(local);
  return distance;
}

void ReplicaAverage::leave() {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < local_values_.size(); ++i) {
    buckets_[i]->wire.copy_(local_values_[i]);
    buckets_[i]->unpack(1.0);
  }
  local_values_.clear();
}

}  // namespace torchext
