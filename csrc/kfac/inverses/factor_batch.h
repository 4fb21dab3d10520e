// Many factors inverted at once, on any device: those of equal size in one batched call, and one wait for all answers.
//
// What fails in float32 is tried again in float64, and left empty if that fails too, as in factor_inverse.h. cuSOLVER
// is reached through ATen, which loads it when it is first needed and keeps its handles; Cholesky is queued without a
// wait, ATen's eigendecomposition waits once a call.
#pragma once

#include <vector>

#include <ATen/ATen.h>

#include "kfac/linalg/factor_inverse.h"

namespace torchext {

struct FactorToInvert {
  at::Tensor factor;   // [count, d, d], symmetric and finite
  at::Tensor damping;  // [count], added to the diagonal; of kInverse only
  // Factors with different marks are never in one call: a batch of another composition may round otherwise, and what
  // all ranks invert for themselves must be the same to the last bit.
  bool everywhere = false;
};

// One a factor, in their order. Inverses are symmetric to the last bit.
std::vector<FactorInverse> invertFactors(const std::vector<FactorToInvert>& factors, InverseForm form,
                                         InverseFailures& failures);

}  // namespace torchext
