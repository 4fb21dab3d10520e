// factorLinear is the forward pass of an nn.Linear whose weight gets its gradient from the rows of all ranks.
//
// Its node in the graph computes the input's gradient, and hands input and output gradient to SufficientFactors. The
// weight's own gradient is never formed there. A pass that is for other tensors (torch.autograd.grad) keeps no rows.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>

#include <ATen/ATen.h>

#include "ddp/factors/sufficient_factors.h"

namespace torchext {

// Throws in the backward pass where create_graph=True asks for gradients of gradients: c10::NotImplementedError.
at::Tensor factorLinear(const std::shared_ptr<SufficientFactors>& factors, std::size_t layer, const at::Tensor& input,
                        const at::Tensor& weight, const std::optional<at::Tensor>& bias);

}  // namespace torchext
