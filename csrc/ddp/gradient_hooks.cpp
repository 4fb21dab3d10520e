#include "ddp/gradient_hooks.h"

#include <memory>

#include <torch/csrc/autograd/utils/lambda_post_hook.h>

namespace torchext {

GradientHooks::GradientHooks(const std::vector<at::Tensor>& parameters, std::function<void(std::size_t)> callback) {
  const auto shared = std::make_shared<std::function<void(std::size_t)>>(std::move(callback));
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
    const std::uintptr_t key = accumulator->add_post_hook(std::move(hook));
    hooks_.emplace_back(std::move(accumulator), key);
  }
}

void GradientHooks::remove() {
  for (auto& [accumulator, key] : hooks_) {
    accumulator->del_post_hook(key);
  }
  hooks_.clear();
}

}  // namespace torchext
