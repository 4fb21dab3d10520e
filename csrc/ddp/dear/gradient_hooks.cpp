#include "ddp/dear/gradient_hooks.h"

#include <memory>

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>

namespace torchext {

namespace {

class BeforeAccumulation : public torch::autograd::FunctionPreHook {
 public:
  BeforeAccumulation(std::weak_ptr<GradientHooks::Callback> callback, std::size_t parameter)
      : callback_(std::move(callback)), parameter_(parameter) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    if (const auto callback = callback_.lock()) {
      (*callback)(parameter_);
    }
    return gradients;
  }

 private:
  std::weak_ptr<GradientHooks::Callback> callback_;
  std::size_t parameter_;
};

}  // namespace

GradientHooks::GradientHooks(const std::vector<at::Tensor>& parameters, Callback before, Callback after)
    : before_(std::make_shared<Callback>(std::move(before))) {
  const auto shared = std::make_shared<Callback>(std::move(after));
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (!parameters[i].requires_grad()) {
      continue;
    }
    Accumulator accumulator = torch::autograd::impl::grad_accumulator(parameters[i]);
    auto hook = std::make_unique<torch::autograd::utils::LambdaPostHook>(
        [shared, i](const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& /*inputs*/) {
          (*shared)(i);
          return outputs;
        });
    accumulator->add_pre_hook(std::make_unique<BeforeAccumulation>(before_, i));
    const std::uintptr_t key = accumulator->add_post_hook(std::move(hook));
    hooks_.emplace_back(std::move(accumulator), key);
  }
}

void GradientHooks::remove() {
  for (auto& [accumulator, key] : hooks_) {
    accumulator->del_post_hook(key);
  }
  hooks_.clear();
  before_.reset();
}

}  // namespace torchext
