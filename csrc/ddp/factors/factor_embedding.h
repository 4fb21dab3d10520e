// factorEmbedding is the forward pass of an nn.Embedding whose table gets its gradient from the rows of all ranks.
//
// Its node in the graph hands indices and output gradient to SufficientFactors. The table's own gradient, which is as
// large as the table, is never formed there. A pass that is for other tensors (torch.autograd.grad) keeps no rows.
#pragma once

#include <cstddef>
#include <memory>

#include <ATen/ATen.h>

#include "ddp/factors/sufficient_factors.h"

namespace torchext {

// Throws in the backward pass where create_graph=True asks for gradients of gradients: c10::NotImplementedError.
at::Tensor factorEmbedding(const std::shared_ptr<SufficientFactors>& factors, std::size_t layer,
                           const at::Tensor& indices, const at::Tensor& weight);

}  // namespace torchext
