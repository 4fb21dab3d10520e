#include "kfac/engine/factor_hooks.h"

#include <cstdint>

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include "kfac/base/engine_guards.h"
#include "kfac/base/scoped_timer.h"
#include "kfac/factors/weight_use.h"

namespace torchext {
namespace {

// Of tensors that would be freed earlier without K-FAC.
constexpr std::size_t kLargestDeferred = std::size_t{16} << 20;

// Whether the backward pass that runs here has a gradient of `weight` for its caller. torch.autograd.grad() of
// something else does not: it only comes past.
bool reaches(const at::Tensor& weight) {
  const auto* only = torch::autograd::get_current_graph_task_exec_info();
  if (only == nullptr || only->empty()) {
    return true;  // backward(), to all leaves
  }
  const auto leaf = torch::autograd::impl::grad_accumulator(weight);
  const auto found = only->find(leaf.get());
  return found != only->end() && found->second.should_execute();
}

// Under autocast a layer reads a copy of its input in the type of its output, and the input may change afterwards.
at::Tensor asRead(const KfacLayerSpec& spec, const at::Tensor& input, at::ScalarType type_of_output) {
  const EngineGuards guards;
  const at::Tensor read = denseSamples(spec, input.detach(), /*is_input=*/true);
  return read.is_floating_point() && read.scalar_type() != type_of_output ? read.to(type_of_output) : read;
}

// Nothing of a tensor whose elements are not laid out by sizes.
std::optional<std::vector<std::int64_t>> sizesOf(const torch::autograd::InputMetadata& output) {
  if (output.is_nested_tensor() || output.is_cpp_nested_tensor()) {
    return std::nullopt;
  }
  std::vector<std::int64_t> sizes;
  for (const c10::SymInt& size : output.shape_as_dim_vector()) {
    sizes.push_back(size.guard_int(__FILE__, __LINE__));
  }
  return sizes;
}

}  // namespace

bool FactorHooks::forward(int layer, const at::Tensor& input, const std::vector<at::Tensor>& outputs,
                          const std::shared_ptr<FactorHooks>& self) {
  const bool used = context_.updatesFactors() || gradients_.ofRows(layer);
  if (!used || !at::GradMode::is_enabled()) {
    return true;
  }
  const KfacLayerSpec& spec = context_.layer(layer);
  const auto use = WeightUse::find(spec.weight, outputs);
  if (!use) {
    return false;
  }
  const auto& output = use->output();
  TORCH_CHECK_VALUE(output.device() == context_.device && input.device() == context_.device,
                    "torchext.optim: ", spec.name, " was on ", context_.device,
                    " when the optimizer was made, and computes on ", output.device(), " now; move the model first");
  // The hook lives in the graph, and dies with it or with the engine. Autograd keeps for the weight's gradient what the
  // layer has read: the input, or its copy in the type of autocast. A forward pass inside of a backward one is that of
  // a reentrant checkpoint: what comes of it, in a pass of its own, belongs to the outer one.
  const int outer = torch::autograd::get_current_graph_task_id();
  const at::Tensor kept = asRead(spec, input, c10::typeMetaToScalarType(output.dtype()));
  const auto sizes = outputSizes(spec, kept, sizesOf(output));
  const auto version = kept.is_inference() ? 0 : kept._version();
  use->watch(
      this, [weak = std::weak_ptr<FactorHooks>(self), layer, outer, kept, version, sizes](const at::Tensor& gradient) {
        const auto hooks = weak.lock();
        if (!hooks) {
          return;
        }
        const KfacLayerSpec& spec = hooks->context_.layer(layer);
        // Autograd sees that, too, but not where it has kept a copy of its own: of an input that the layer has padded.
        TORCH_CHECK_VALUE(kept.is_inference() || kept._version() == version, "torchext.optim: the input of ", spec.name,
                          " was changed in place between the forward and the backward pass; change a copy of it, or "
                          "leave the layer to the plain gradient, by its name in skip_layers");
        const int pass = outer >= 0 ? outer : torch::autograd::get_current_graph_task_id();
        at::Tensor samples;
        {
          const EngineGuards guards;
          samples = denseSamples(spec, gradient.detach(), /*is_input=*/false).reshape(sizes);
        }
        hooks->backward(layer, kept, samples, pass, hooks);
      });
  return true;
}

void FactorHooks::backward(int layer, const at::Tensor& input, const at::Tensor& gradient, int pass,
                           const std::shared_ptr<FactorHooks>& self) {
  if (!reaches(context_.layer(layer).weight)) {
    return;
  }
  const EngineGuards guards;
  const ReentrancyGuard guard(context_.turn, "backward");
  const ScopedTimer timer(context_.counters.factor_seconds);
  if (gradients_.keep(layer, input, gradient)) {
    callAtEndOfPass(self);
  }
  if (!context_.updatesFactors()) {
    return;
  }
  seen_backward_ = true;
  if (defer(layer, input, gradient, pass)) {
    callAtEndOfPass(self);
    return;
  }
  factors_.add(layer, input, gradient, pass, /*may_leave=*/onFirstStream());
}

// Whether this hook runs on the stream of the step's first one. A bucket leaves from the stream of its last factor;
// factors of other streams are there for certain only when the backward pass has ended.
bool FactorHooks::onFirstStream() {
  if (context_.device.is_cpu()) {
    return true;
  }
  const c10::Stream stream = c10::impl::VirtualGuardImpl(context_.device.type()).getStream(context_.device);
  if (!stream_) {
    stream_ = stream;
  }
  several_streams_ = several_streams_ || *stream_ != stream;
  return !several_streams_;
}

bool FactorHooks::defer(int layer, const at::Tensor& input, const at::Tensor& gradient, int backward_pass) {
  const std::size_t bytes = input.nbytes() + gradient.nbytes();
  if (!context_.comm || context_.on_device || context_.sendsFactors() || deferred_bytes_ + bytes > kLargestDeferred) {
    return false;
  }
  deferred_.push_back({layer, input, gradient, backward_pass});
  deferred_bytes_ += bytes;
  return true;
}

// What can be made while the backward pass waits for DDP's all-reduces, once it has nothing else to compute.
void FactorHooks::callAtEndOfPass(const std::shared_ptr<FactorHooks>& self) {
  const int here = torch::autograd::get_current_graph_task_id();
  if (calling_pass_ == here) {
    return;
  }
  calling_pass_ = here;
  torch::autograd::Engine::get_default_engine().queue_callback([weak = std::weak_ptr<FactorHooks>(self)] {
    if (const auto hooks = weak.lock()) {
      const EngineGuards guards;
      const ReentrancyGuard guard(hooks->context_.turn, "backward");
      hooks->addDeferred();
      hooks->gradients_.begin();
    }
  });
}

void FactorHooks::addDeferred() {
  const ScopedTimer timer(context_.counters.factor_seconds);
  for (const Deferred& call : deferred_) {
    factors_.add(call.layer, call.input, call.gradient, call.backward_pass, /*may_leave=*/false);
  }
  forgetDeferred();
}

void FactorHooks::forgetDeferred() {
  deferred_.clear();
  deferred_bytes_ = 0;
}

void FactorHooks::endStep() {
  stream_.reset();
  several_streams_ = false;
  seen_backward_ = false;
}

}  // namespace torchext
