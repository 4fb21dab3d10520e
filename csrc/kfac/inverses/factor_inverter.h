// From a step's factors, as they lie in a buffer, to their inverses.
//
// A value that owns what it uses, and changes none of it: copies may be used on several threads.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <vector>

#include <ATen/ATen.h>

#include "kfac/factors/factor_accumulator.h"
#include "kfac/linalg/factor_inverse.h"

namespace torchext {

struct FactorInverter {
  std::shared_ptr<const FactorAccumulator> accumulator;
  at::Tensor factors;            // laid out as the running averages: sums over ranks, or means
  std::vector<double> divisors;  // [factor] that make a mean of it
  InverseForm form = InverseForm::kInverse;

  const FactorLayout& layout(std::size_t number) const { return accumulator->layouts()[number]; }
  at::Tensor mean(std::size_t number) const;
  // [count] in float64, of the mean.
  at::Tensor traces(std::size_t number) const;
  // Factored Tikhonov, of a layer's two factors by their traces: pi balances the damping by their mean eigenvalues.
  // Each [count]; undefined where damping belongs to the product (kEigen).
  std::array<at::Tensor, 2> dampings(std::size_t first_factor, const std::array<at::Tensor, 2>& traces,
                                     double damping) const;
  // damping: of that factor. Not defined where LAPACK gave up: the last good one is used on.
  FactorInverse invert(std::size_t number, const at::Tensor& damping, InverseFailures& failures) const;
  FactorInverse invertDiagonal(std::size_t number, const at::Tensor& damping) const;
};

}  // namespace torchext
