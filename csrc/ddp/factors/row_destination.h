// RowDestination says where the rows of a layer's call go, as a node of the graph holds it.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>

#include "ddp/factors/sufficient_factors.h"

namespace torchext {

class RowDestination : public torch::CustomClassHolder {
 public:
  RowDestination(std::shared_ptr<SufficientFactors> factors, std::size_t layer)
      : factors_(std::move(factors)), layer_(layer) {}

  void saveIn(torch::autograd::AutogradContext& context) {
    context.saved_data["destination"] =
        c10::IValue::make_capsule(c10::intrusive_ptr<RowDestination>::reclaim_copy(this));
  }

  // Hands over the rows of the call whose backward pass this is. Throws where create_graph=True asks for gradients of
  // gradients: c10::NotImplementedError.
  static void keep(const torch::autograd::AutogradContext& context, const at::Tensor& input,
                   const at::Tensor& gradient) {
    TORCH_CHECK_NOT_IMPLEMENTED(!at::GradMode::is_enabled(),
                                "torchext.auto: a layer whose rows are sent has no gradients of gradients; leave it "
                                "out of the layers, or create_graph=True");
    const auto own =
        c10::static_intrusive_pointer_cast<RowDestination>(context.saved_data.at("destination").toCapsule());
    own->factors_->keep(own->layer_, input, gradient);
  }

 private:
  const std::shared_ptr<SufficientFactors> factors_;
  const std::size_t layer_;
};

}  // namespace torchext
