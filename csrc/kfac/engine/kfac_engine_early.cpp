// Directions of Linear layers that are made inside the backward pass (early_directions.h), in all steps but those that
// make inverses. Those take the path of the other layers, so that the result is the same with the option and without.
#include <algorithm>

#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include "core/base/check.h"
#include "kfac/base/engine_guards.h"
#include "kfac/base/scoped_timer.h"
#include "kfac/comm/kfac_tags.h"
#include "kfac/engine/kfac_engine.h"

namespace torchext {
namespace {

// Whether torch.autograd.grad() asks for this parameter's gradient: that goes to its caller, not into .grad.
bool goesToCaller(const at::Tensor& parameter) {
  const auto* only = torch::autograd::get_current_graph_task_exec_info();
  if (only == nullptr || only->empty()) {
    return false;
  }
  const auto leaf = torch::autograd::impl::grad_accumulator(parameter);
  const auto found = only->find(leaf.get());
  return found != only->end() && found->second.captures_ != nullptr;
}

}  // namespace

bool KfacEngine::isEarly(int layer) const { return early_ && EarlyDirections::takes(layers_[core::index(layer)]); }

// The same on all ranks, who count steps together.
bool KfacEngine::inEarlyStep() const { return early_ && !updatesInverses(); }

double KfacEngine::earlySaving() const {
  if (early_ || rows_ || !device_.is_cpu() || options_.form != InverseForm::kInverse ||
      options_.inverse_update_steps == 1) {
    return 0;
  }
  core::KfacPlanInput input = input_;
  for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
    input.early.push_back(EarlyDirections::takes(layers_[layer]));
    if (input.early.back() && plan_.workers[layer] < ranks_) {
      return 0;
    }
  }
  const core::KfacPrediction now = prediction();
  const core::KfacPrediction then = core::predictKfac(plan_, input);
  return std::max(0.0, now.precondition + now.gradients - then.precondition - then.gradients);
}

void KfacEngine::watchGradients() {
  const Lock lock(mutex_);
  if (!early_ || !watched_.empty()) {
    return;
  }
  for (int layer = 0; layer < static_cast<int>(layers_.size()); ++layer) {
    if (!isEarly(layer)) {
      continue;
    }
    const KfacLayerSpec& spec = layers_[core::index(layer)];
    const auto watch = [&](const at::Tensor& parameter, bool is_bias) {
      const unsigned place =
          parameter.register_hook([weak = weak_from_this(), layer, is_bias](const at::TensorBase& gradient) {
            const auto engine = weak.lock();
            return engine && gradient.defined() ? engine->atGradient(layer, is_bias, at::Tensor(gradient))
                                                : at::Tensor(gradient);
          });
      watched_.push_back({parameter, place});
    };
    watch(spec.weight, /*is_bias=*/false);
    if (spec.bias) {
      watch(*spec.bias, /*is_bias=*/true);
    }
  }
}

void KfacEngine::unwatchGradients() {
  const Lock lock(mutex_);
  for (const Watched& watched : watched_) {
    watched.parameter.remove_hook(watched.place);
  }
  watched_.clear();
}

// What becomes of a parameter's whole gradient, in autograd's thread, before it is added to .grad.
at::Tensor KfacEngine::atGradient(int layer, bool is_bias, const at::Tensor& gradient) {
  const KfacLayerSpec& spec = layers_[core::index(layer)];
  if (!spec.weight.requires_grad() || goesToCaller(is_bias ? *spec.bias : spec.weight)) {
    return gradient;
  }
  const bool graph = at::GradMode::is_enabled();
  const EngineGuards guards;
  const ReentrancyGuard guard(*this, "backward");
  if (!inEarlyStep()) {
    return gradient;
  }
  TORCH_CHECK_VALUE(!graph,
                    "torchext.optim: backward(create_graph=True) in a step whose directions are made inside of "
                    "it, which have no graph; leave early_directions out");
  const ScopedTimer timer(stats_.precondition_seconds);
  const std::size_t outputs = 2 * (layers_.size() - 1 - core::index(layer));
  const int pass = torch::autograd::get_current_graph_task_id();
  const FactorInverse& of_inputs = inverses_[outputs + 1];
  const FactorInverse& of_outputs = inverses_[outputs];
  return is_bias ? early_->ofBias(layer, gradient, of_inputs, of_outputs, pass)
                 : early_->ofWeight(layer, gradient, of_inputs, of_outputs, preconditioner_->tiles(layer), pass);
}

// In a step that is left out because something in it was not a number: was it made so on purpose (early_directions.h)?
// Every rank asks the others, and all throw.
void KfacEngine::refuseMisuse() {
  const at::Tensor found = ofAllRanks(at::full({1}, early_->misused(), at::kLong), kfac_tags::kEarly);
  const auto* layers = found.const_data_ptr<std::int64_t>();
  const auto* end = layers + ranks_;
  const auto* first = std::find_if(layers, end, [](auto layer) { return layer >= 0; });
  if (first == end) {
    return;
  }
  drop(/*sent=*/true);
  TORCH_CHECK_VALUE(false, "torchext.optim: on rank ", first - layers, " the gradients of ",
                    layers_[core::index(static_cast<int>(*first))].name,
                    " are not those of its calls: a penalty in the loss, or another use of its parameters, would be "
                    "left out of directions that are made in the backward pass; nothing was changed. Use weight_decay "
                    "for a penalty, leave the layer to the plain gradient by its name in skip_layers, or leave "
                    "early_directions out");
}

// Of the layers whose .grad holds the mean direction already: what the KL clip needs, the mean over ranks of <V, dW>.
Preconditioner::Finished KfacEngine::finishEarly(const std::vector<double>& rates, double loss_scale) {
  Preconditioner::Finished finished;
  finished.layers.resize(layers_.size());
  bool asked = false;
  bool seen = false;
  for (int layer = 0; layer < static_cast<int>(layers_.size()); ++layer) {
    finished.layers[core::index(layer)] = isEarly(layer);
    asked = asked || (isEarly(layer) && preconditioner_->active(layer));
    seen = seen || early_->made(layer);
  }
  // On an accelerator nothing may wait for the device: the sum stays there, and whether gradients were seen does not
  // depend on it.
  at::Tensor own = early_->product(rates).div_(loss_scale).reshape({1});
  at::Tensor seen_by = at::full({1}, seen ? 1.0 : 0.0, at::kDouble);
  if (device_path_) {
    seen_by = ofAllRanks(seen_by, kfac_tags::kEarly);
    if (exchange_) {
      exchange_->allReduce(own).wait();
    }
    finished.product = own.div_(ranks_).squeeze(0);
  } else {
    const at::Tensor all = ofAllRanks(at::cat({own, seen_by}), kfac_tags::kEarly);
    finished.product = all.select(1, 0).mean();
    seen_by = all.select(1, 1);
  }
  if (asked && !(seen_by.sum().item<double>() > 0)) {
    drop(/*sent=*/true);
    TORCH_CHECK_VALUE(false,
                      "torchext.optim: gradients that no backward() has put into .grad (by hand, or of "
                      "torch.autograd.grad()) are no directions, which this step would take them for; leave "
                      "early_directions out");
  }
  return finished;
}

}  // namespace torchext
