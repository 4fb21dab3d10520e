#include "ddp/factors/factor_linear.h"

#include <algorithm>

#include <torch/csrc/autograd/custom_function.h>

#include "ddp/factors/row_destination.h"

namespace torchext {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr std::size_t kInput = 0;
constexpr std::size_t kWeight = 1;
constexpr std::size_t kBias = 2;

class FactorLinear : public torch::autograd::Function<FactorLinear> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias,
                            const c10::intrusive_ptr<RowDestination>& destination) {
    context->save_for_backward({input, weight});
    context->saved_data["bias"] = bias.has_value();
    destination->saveIn(*context);
    return at::linear(input, weight, bias);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor& input = saved[kInput];
    const at::Tensor& weight = saved[kWeight];
    const at::Tensor& gradient = gradients.front();
    const bool of_bias = context->saved_data["bias"].toBool() && context->needs_input_grad(kBias);
    if (context->needs_input_grad(kWeight) || of_bias) {
      RowDestination::keep(*context, input, gradient);
    }
    at::Tensor result;
    if (context->needs_input_grad(kInput)) {
      result = at::matmul(gradient, weight.to(gradient.scalar_type())).to(input.scalar_type());
    }
    return {result, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor factorLinear(const std::shared_ptr<SufficientFactors>& factors, std::size_t layer, const at::Tensor& input,
                        const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  if (!at::GradMode::is_enabled()) {
    return at::linear(input, weight, bias);
  }
  factors->countRows(layer, input.numel() / std::max<std::int64_t>(weight.size(1), 1));
  return FactorLinear::apply(input, weight, bias, c10::make_intrusive<RowDestination>(factors, layer));
}

}  // namespace torchext
