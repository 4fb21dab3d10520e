#include "ddp/dear/replicated_form.h"

#include <algorithm>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include "core/base/check.h"

namespace torchext {

ReplicatedForm::ReplicatedForm(const std::vector<at::Tensor>& parameters, const std::vector<std::string>& names,
                               const BackwardPass& pass, BucketExchanges& exchanges)
    : parameters_(parameters),
      names_(names),
      pass_(pass),
      exchanges_(exchanges),
      settled_(parameters.size(), 1),
      versions_(parameters.size()) {}

void ReplicatedForm::backwardBegins() {
  gathered_ = false;
  whole_.assign(parameters_.size(), at::Tensor());
}

void ReplicatedForm::backwardEnds() {
  noteVersions();
  std::fill(settled_.begin(), settled_.end(), 0);
  gatherGradients();
}

// The own slices are in the staging buffers already. What is gathered takes the place of the local gradients.
void ReplicatedForm::gatherGradients() {
  gathered_ = true;
  exchanges_.gatherAll([this](std::size_t bucket) -> BucketExchanges::Gather {
    std::vector<at::Tensor> locals;
    for (const std::int64_t tensor : exchanges_.buckets()->tensorsOf(bucket)) {
      locals.push_back(parameters_[core::index(tensor)].grad());
    }
    return {nullptr, [this, bucket, locals = std::move(locals)] { take(bucket, locals); }};
  });
}

// locals: of the bucket's tensors, undefined where this rank has none.
void ReplicatedForm::take(std::size_t bucket, const std::vector<at::Tensor>& locals) {
  const ShardBuckets& buckets = *exchanges_.buckets();
  std::vector<at::Tensor> targets(locals.size());
  for (std::size_t i = 0; i < locals.size(); ++i) {
    const std::size_t parameter = core::index(buckets.tensorsOf(bucket)[i]);
    if (buckets.hasGradient(parameter)) {
      const at::Tensor& like = parameters_[parameter];
      const bool usable = locals[i].defined() && sameMemoryOrder(locals[i], like);
      // With a version of its own: it tells what a script does to the parameter's gradient.
      targets[i] = whole_[parameter] = usable ? locals[i].variable_data() : at::empty_like(like);
    }
  }
  buckets.unpackGradients(bucket, targets);
}

std::optional<at::Tensor> ReplicatedForm::gradient(std::size_t parameter) {
  if (!gathered_) {
    return std::nullopt;
  }
  exchanges_.waitGathered(static_cast<std::int64_t>(parameter));
  const at::Tensor& whole = whole_[parameter];
  if (whole.defined() && !whole.device().is_cpu()) {  // may be of the exchange thread's stream, and is used on this one
    whole.record_stream(c10::impl::VirtualGuardImpl(whole.device().type()).getStream(whole.device()));
  }
  return whole.defined() ? std::optional(whole) : std::nullopt;
}

void ReplicatedForm::settleGradient(std::size_t parameter) {
  if (!pass_.complete() || settled_[parameter] != 0) {
    return;
  }
  exchanges_.checkNotEnded();
  const std::optional<at::Tensor> averaged = gradient(parameter);
  checkVersion(parameter);
  settled_[parameter] = 1;
  const at::Tensor own = parameters_[parameter].grad();
  if (averaged && (!own.defined() || own.data_ptr() != averaged->data_ptr())) {
    parameters_[parameter].mutable_grad() = *averaged;
  }
}

// A pass that adds to gradients into whose memory others are being gathered waits for them.
void ReplicatedForm::beforeAccumulation(std::size_t parameter) {
  if (exchanges_.bucketOf(parameter)) {
    settleGradient(parameter);
  }
}

void ReplicatedForm::noteVersions() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& gradient = parameters_[i].grad();
    versions_[i] = {gradient.defined() ? gradient.data_ptr() : nullptr, gradient.defined() ? gradient._version() : 0};
  }
}

void ReplicatedForm::checkStep() const {
  const bool there = exchanges_.buckets() != nullptr && pass_.complete();
  for (std::size_t i = 0; there && i < parameters_.size(); ++i) {
    if (settled_[i] == 0) {
      checkVersion(i);
    }
  }
}

// What is exchanged was read, or will be written, behind the back of a script that kept a reference to a gradient.
void ReplicatedForm::checkVersion(std::size_t parameter) const {
  const at::Tensor& gradient = parameters_[parameter].grad();
  const auto& [memory, version] = versions_[parameter];
  TORCH_CHECK(!gradient.defined() || memory != gradient.data_ptr() || version == gradient._version(),
              "dear: the gradient of ", names_[parameter],
              " was changed through a reference from before the backward pass, when it was on its way already, so the "
              "change would be lost; change parameter.grad as it is after the pass");
}

}  // namespace torchext
