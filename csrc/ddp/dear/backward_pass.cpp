#include "ddp/dear/backward_pass.h"

#include <algorithm>
#include <utility>

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>

#include "core/base/check.h"

namespace torchext {

BackwardPass::BackwardPass(const std::vector<at::Tensor>& parameters, const std::vector<std::string>& names,
                           std::function<void()> on_end)
    : parameters_(parameters), names_(names), on_end_(std::move(on_end)), gradients_(parameters.size()) {}

void BackwardPass::reset(const ShardBuckets* buckets) {
  std::vector<std::vector<std::int64_t>> tensors;
  for (std::size_t b = 0; buckets != nullptr && b < buckets->size(); ++b) {
    tensors.push_back(buckets->tensorsOf(b));
  }
  buckets_ = core::ReadyBuckets(std::move(tensors), parameters_.size());
}

void BackwardPass::expect(bool armed) {
  armed_ = armed;
  end_queued_ = false;  // a backward pass that raised has had no end
  begun_ = begun_ && !armed;
}

// Autograd runs what is queued at the end of the pass that queues it, and a reentrant activation checkpoint is a pass
// of its own inside: the first gradient may come from there. So whoever knows the outer pass queues the end before.
void BackwardPass::queueEnd() {
  if (std::exchange(end_queued_, true)) {
    return;
  }
  torch::autograd::Engine::get_default_engine().queue_callback([this] {
    end_queued_ = false;
    if (armed_ && begun_) {  // else it was of no parameters (torch.autograd.grad), or of no_sync()
      on_end_();
    }
  });
}

void BackwardPass::begin() {
  begun_ = true;
  complete_ = false;
  order_.clear();
  std::fill(gradients_.begin(), gradients_.end(), at::Tensor());
  buckets_.begin();
  queueEnd();
}

at::Tensor BackwardPass::denseGradient(std::size_t parameter) const {
  const at::Tensor& gradient = parameters_[parameter].grad();
  TORCH_CHECK_TYPE(!gradient.defined() || gradient.layout() == at::kStrided, "dear: parameter ", names_[parameter],
                   " has a ", gradient.layout(), " gradient; make it dense (nn.Embedding(sparse=False))");
  return gradient;
}

void BackwardPass::add(std::size_t parameter, const at::Tensor& gradient) {
  order_.push_back(static_cast<std::int64_t>(parameter));
  if (buckets_.size() == 0) {
    return;
  }
  TORCH_CHECK(buckets_.arrive(parameter), "dear: parameter ", names_[parameter],
              " got its gradient twice in one backward pass, the first one is on its way already; use activation "
              "checkpointing with use_reentrant=False");
  gradients_[parameter] = gradient;
}

std::optional<BackwardPass::Bucket> BackwardPass::takeReady() {
  const std::optional<std::size_t> bucket = buckets_.take();
  if (!bucket) {
    return std::nullopt;
  }
  Bucket ready{*bucket, {}};
  for (const std::int64_t tensor : buckets_.tensorsOf(*bucket)) {
    ready.gradients.push_back(std::move(gradients_[core::index(tensor)]));
  }
  return ready;
}

std::string BackwardPass::missing(const std::vector<std::int64_t>& order) const {
  const std::vector<std::int64_t> missing = buckets_.missing();
  const auto needed = [this](std::int64_t tensor) { return parameters_[core::index(tensor)].requires_grad(); };
  std::string text;
  if (std::none_of(missing.begin(), missing.end(), needed)) {
    return text;
  }
  for (const std::int64_t tensor : order) {
    if (!buckets_.hasArrived(core::index(tensor)) && text.size() < 200) {
      text += (text.empty() ? "" : ", ") + names_[core::index(tensor)];
    }
  }
  return text;
}

void BackwardPass::end() {
  for (const std::int64_t tensor : buckets_.missing()) {
    gradients_[core::index(tensor)] = denseGradient(core::index(tensor));
  }
  buckets_.end();
  complete_ = true;
}

}  // namespace torchext
