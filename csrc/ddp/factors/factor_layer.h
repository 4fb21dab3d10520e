// FactorLayer is a layer whose gradients are made of rows, one for each sample; here is what a row is, and what
// gradients rows make.
//
//   nn.Linear     a row is an input a, and the gradient g at its output. The weight's gradient is G^T A, the sum of
//                 g a^T over all rows; the bias' is the sum of G.
//   nn.Embedding  a row is an index i, and the gradient g at its output. Place i of the table's gradient is the sum of
//                 the g that have this index, in the order of the rows. The padding index gets none, as in torch.
//
// On the way a row is two runs of numbers of one type. An index travels as the bits of a 64-bit integer: two floats, or
// one double. Nothing computes with these.
// Functions of any thread, without gradients of their own.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "c10d/transport/agreement.h"
#include "c10d/transport/row_exchange.h"

namespace torchext {

struct FactorLayer {
  enum class Kind { kLinear, kEmbedding };

  std::string name;         // of the module
  at::Tensor weight;        // [outputs, inputs], on the CPU; of an embedding [indices, outputs]
  at::Tensor bias;          // [outputs]; undefined: none
  std::int64_t places = 0;  // for rows of each rank in a step, all its passes in no_sync() among them
  Kind kind = Kind::kLinear;
  std::int64_t padding = -1;  // of an embedding: the index without a gradient; -1: none
};

struct FactorRows {
  at::Tensor input;     // [rows, inputs], or [rows, numbers of an index]
  at::Tensor gradient;  // [rows, outputs]
};

struct FactorGradients {
  void add(const FactorGradients& others);  // what is defined of them
  FactorGradients clone() const;

  at::Tensor weight;
  at::Tensor bias;  // undefined: none
};

// Of rows on the way: as wide as the widest weight, float at least.
at::ScalarType rowTypeOf(const std::vector<FactorLayer>& layers);
// The places of the layers' rows in messages. ValueError on none at all. who: asks, in errors.
std::vector<RowExchange::Matrix> matricesOf(const char* who, const std::vector<FactorLayer>& layers);
// What must be the same on all ranks.
AgreementFields fieldsOf(const std::vector<FactorLayer>& layers);
// What a call of the layer gives: input [..., inputs] or indices [...], gradient [..., outputs].
FactorRows rowsOfCall(const FactorLayer& layer, const at::Tensor& input, const at::Tensor& gradient,
                      at::ScalarType type);
// One after the other; at least one.
FactorRows joined(const std::vector<FactorRows>& parts);
FactorGradients gradientsOf(const FactorLayer& layer, const FactorRows& rows);
// Zeros, and the one buffer of which they are parts.
std::pair<at::Tensor, FactorGradients> noGradients(const FactorLayer& layer, const at::TensorOptions& options);
// What .grad holds.
FactorGradients gradOf(const FactorLayer& layer);
// Adds to that, of parameters that are trained; where there is none it may keep these.
void addToGrad(const FactorLayer& layer, const FactorGradients& gradients);
void dropGrad(const FactorLayer& layer);

}  // namespace torchext
