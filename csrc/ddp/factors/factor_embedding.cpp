#include "ddp/factors/factor_embedding.h"

#include <torch/csrc/autograd/custom_function.h>

#include "ddp/factors/row_destination.h"

namespace torchext {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr std::size_t kTable = 1;

class FactorEmbedding : public torch::autograd::Function<FactorEmbedding> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& indices, const at::Tensor& weight,
                            const c10::intrusive_ptr<RowDestination>& destination) {
    context->save_for_backward({indices});
    destination->saveIn(*context);
    return at::embedding(weight, indices);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    if (context->needs_input_grad(kTable)) {
      RowDestination::keep(*context, context->get_saved_variables().front(), gradients.front());
    }
    return {at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor factorEmbedding(const std::shared_ptr<SufficientFactors>& factors, std::size_t layer,
                           const at::Tensor& indices, const at::Tensor& weight) {
  if (!at::GradMode::is_enabled()) {
    return at::embedding(weight, indices);
  }
  factors->countRows(layer, indices.numel());
  return FactorEmbedding::apply(indices, weight, c10::make_intrusive<RowDestination>(factors, layer));
}

}  // namespace torchext
