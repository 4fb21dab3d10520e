// What DearSynchronizer gives the optimizer to step with: which gradients there are, the waits for them, and what may
// not be done to them meanwhile.
#include <algorithm>
#include <string>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include "core/check.h"
#include "ddp/dear_synchronizer.h"

namespace torchext {

at::Tensor DearSynchronizer::stepped(std::size_t parameter) const {
  return replicated_ ? parameters_.at(parameter).detach()
                     : ownSlice(parameters_.at(parameter), group_->getSize(), group_->getRank());
}

std::optional<at::Tensor> DearSynchronizer::ownGradient(std::size_t parameter) {
  TORCH_CHECK(!allreduce(),
              "dear: this model trains as plain DDP at the moment; its gradients are the parameters' own");
  TORCH_CHECK(!gathered_, "dear: the gradients are whole already");
  if (!complete_) {
    return std::nullopt;
  }
  checkNotLeft();
  if (!buckets_->holds(parameter)) {
    return std::nullopt;
  }
  const std::size_t bucket = buckets_->bucketOf(parameter);
  const double waited = waitUntil("torchext::dear::wait", [&] { return reducing_[bucket] == 0; });
  if (waited > 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    stats_.exposed_rs_ms += waited;
  }
  checkNotLeft();
  return buckets_->hasGradient(parameter) ? std::optional(buckets_->gradient(parameter)) : std::nullopt;
}

std::optional<std::size_t> DearSynchronizer::bucketOf(std::size_t parameter) const {
  return buckets_ && buckets_->holds(parameter) ? std::optional(buckets_->bucketOf(parameter)) : std::nullopt;
}

std::size_t DearSynchronizer::arrivedBuckets(std::size_t known) {
  if (!complete_) {
    return bucketCount();  // nothing is on its way
  }
  const auto arrived = [this] {
    return static_cast<std::size_t>(std::find(reducing_.begin(), reducing_.end(), 1) - reducing_.begin());
  };
  std::size_t count = 0;
  const double waited = waitUntil("torchext::dear::wait", [&] {
    count = arrived();
    return count > known || count == bucketCount();
  });
  const std::lock_guard<std::mutex> lock(mutex_);
  stats_.exposed_rs_ms += waited;
  return count;
}

std::optional<at::Tensor> DearSynchronizer::gradient(std::size_t parameter) {
  if (!replicated_) {
    return ownGradient(parameter);
  }
  if (!gathered_) {
    if (!complete_) {
      return std::nullopt;
    }
    checkNotLeft();
    postGradientGathers();
  }
  const double waited = waitUntil("torchext::dear::wait", [&] { return isGathered(parameter); });
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stats_.exposed_ag_ms += waited;
  }
  checkStepping(parameter);
  const at::Tensor& whole = whole_[parameter];
  if (whole.defined() && !whole.device().is_cpu()) {  // may be of the exchange thread's stream, and is used on this one
    whole.record_stream(c10::impl::VirtualGuardImpl(whole.device().type()).getStream(whole.device()));
  }
  return whole.defined() ? std::optional(whole) : std::nullopt;
}

void DearSynchronizer::throwMissing() {
  std::string missing;
  for (const std::int64_t tensor : planner_.plan().gradient_order) {
    if (seen_[core::index(tensor)] == 0 && missing.size() < 200) {
      missing += (missing.empty() ? "" : ", ") + names_[core::index(tensor)];
    }
  }
  throwRefused(c10::str("no gradient for ", missing,
                        " in this backward pass; every rank must use every parameter, or wrap the ",
                        "model with DistributedDataParallel(..., find_unused_parameters=True)"));
}

void DearSynchronizer::throwRefused(const std::string& text) {
  group_->poison(group_->getRank(), text);  // the others wait for these gradients
  C10_THROW_ERROR(DistBackendError, c10::str(group_->health()->label(), ": ", text));
}

void DearSynchronizer::clearGradients() {
  started_ = complete_ = false;
  gathered_ = gathered_ && stepping_;  // a step that is under way keeps its gradients
}

void DearSynchronizer::checkVersions() const {
  if (!buckets_ || !complete_ || gathered_) {
    return;
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& gradient = parameters_[i].grad();
    TORCH_CHECK(
        !gradient.defined() || versions_[i].first != gradient.data_ptr() || versions_[i].second == gradient._version(),
        "dear: the gradient of ", names_[i],
        " was changed after the backward pass, when it was on its way already, so the change would be lost; "
        "clip with sync.clip_grad_norm_(), and change others through optimizer.param_groups");
  }
}

// The gathered gradient is in the memory of the parameter's own, where there is one.
void DearSynchronizer::checkStepping(std::size_t parameter) const {
  const at::Tensor& gradient = parameters_[parameter].grad();
  const auto& [memory, version] = versions_[parameter];
  TORCH_CHECK(!stepping_ || !gradient.defined() || memory != gradient.data_ptr() || version == gradient._version(),
              "dear: the gradient of ", names_[parameter],
              " was changed between optimizer.step() and the next forward ",
              "pass, in which the replicated form does that step; clear gradients with optimizer.zero_grad(), or call ",
              "sync.wait() before they are changed");
}

}  // namespace torchext
