// What DearSynchronizer gives the optimizer to step with: which gradients there are, the waits for them, and what may
// not be done to them meanwhile.
#include <algorithm>
#include <string>
#include <utility>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include "core/base/check.h"
#include "ddp/dear/dear_synchronizer.h"

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

at::Tensor DearSynchronizer::ownSliceOf(std::size_t parameter, const at::Tensor& whole) const {
  const at::Tensor& like = parameters_.at(parameter);
  TORCH_CHECK(whole.sizes() == like.sizes(), "dear: ", names_[parameter], " has shape ", like.sizes(),
              ", what is to be cut has ", whole.sizes());
  const at::Tensor ordered = sameMemoryOrder(whole, like) ? whole : at::empty_like(like).copy_(whole);
  return ownSlice(ordered, group_->getSize(), group_->getRank());
}

std::optional<at::Tensor> DearSynchronizer::gradient(std::size_t parameter) {
  if (!gathered_) {
    return std::nullopt;
  }
  const double waited = waitUntil("torchext::dear::wait", [&] { return isGathered(parameter); });
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stats_.exposed_ag_ms += waited;
  }
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
  group_->health()->poison(group_->getRank(), text);  // the others wait for these gradients
  C10_THROW_ERROR(DistBackendError, c10::str(group_->health()->label(), ": ", text));
}

void DearSynchronizer::settleGradient(std::size_t parameter) {
  if (!complete_ || settled_[parameter] != 0) {
    return;
  }
  checkNotLeft();
  const std::optional<at::Tensor> averaged = gradient(parameter);
  checkVersion(parameter);
  settled_[parameter] = 1;
  const at::Tensor own = parameters_[parameter].grad();
  if (averaged && (!own.defined() || own.data_ptr() != averaged->data_ptr())) {
    parameters_[parameter].mutable_grad() = *averaged;
  }
}

// A pass that adds to gradients that are still being sent, or gathered into the same memory, waits for them.
void DearSynchronizer::beforeAccumulation(std::size_t parameter) {
  checkNotLost(parameter);
  if (!complete_ || !buckets_ || !buckets_->holds(parameter)) {
    return;
  }
  if (replicated_) {
    settleGradient(parameter);
    return;
  }
  const std::size_t bucket = buckets_->bucketOf(parameter);
  waitUntil("torchext::dear::wait", [&] { return reducing_[bucket] == 0; });
  if (on_accumulating_ && !std::exchange(accumulating_, true)) {
    on_accumulating_();
  }
}

// With what a script has done to averaged gradients before a step, the parameters' own are not in accord.
void DearSynchronizer::checkNotLost(std::size_t parameter) {
  if (lost_.empty() || lost_[parameter] == nullptr) {
    return;
  }
  const at::Tensor& own = parameters_[parameter].grad();
  TORCH_CHECK(!own.defined() || own.data_ptr() != lost_[parameter] || !own.any().item<bool>(), "dear: the gradient of ",
              names_[parameter], " was changed before the last step and is added to after it, ",
              "where that change is lost; call optimizer.zero_grad() after each step, or take ",
              "DeAROptions(form='replicated')");
  lost_[parameter] = nullptr;
}

void DearSynchronizer::clearGradients() {
  started_ = complete_ = false;
  lost_.clear();
}

void DearSynchronizer::noteLocal() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& gradient = parameters_[i].grad();
    local_[i] = gradient.defined() ? gradient.data_ptr() : nullptr;
  }
}

void DearSynchronizer::checkAveraged() const {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& gradient = parameters_[i].grad();
    if (local_[i] == nullptr || !gradient.defined() || gradient.data_ptr() != local_[i]) {
      continue;
    }
    TORCH_CHECK(!gradient.any().item<bool>(), "dear: optimizer.step() has no averaged gradients: that of ", names_[i],
                " is this rank's alone. It was stepped with before, or comes from a backward pass inside no_sync() or "
                "of a forward pass beside DistributedDataParallel's; call optimizer.zero_grad() after each step, and "
                "have the last forward and backward pass before a step outside no_sync(), through the wrapped model");
  }
}

void DearSynchronizer::checkVersions() const {
  for (std::size_t i = 0; buckets_ && complete_ && i < parameters_.size(); ++i) {
    if (settled_[i] == 0) {
      checkVersion(i);
    }
  }
}

// What is exchanged was read, or will be written, behind the back of a script that kept a reference to a gradient.
void DearSynchronizer::checkVersion(std::size_t parameter) const {
  const at::Tensor& gradient = parameters_[parameter].grad();
  const auto& [memory, version] = versions_[parameter];
  TORCH_CHECK(!gradient.defined() || memory != gradient.data_ptr() || version == gradient._version(),
              "dear: the gradient of ", names_[parameter],
              " was changed through a reference from before the backward pass, when it was on its way already, so the "
              "change would be lost; change parameter.grad as it is after the pass");
}

}  // namespace torchext
