#include "optim/factor_inverter.h"

#include <cmath>

namespace torchext {
namespace {

at::Tensor dampingOf(const at::Tensor& own_mean, const at::Tensor& other_mean, double damping, at::ScalarType type) {
  at::Tensor pi = at::sqrt(own_mean / other_mean);
  pi = at::where(at::isfinite(pi).logical_and(pi > 0), pi, at::ones_like(pi));
  return (pi * std::sqrt(damping)).to(type);
}

}  // namespace

at::Tensor FactorInverter::mean(std::size_t number) const {
  const at::Tensor sum = statistics->slice(factors, slot(number));
  return divisors[number] == 1 ? sum : sum / divisors[number];
}

at::Tensor FactorInverter::traces(std::size_t number) const {
  return statistics->traces(statistics->slice(factors, slot(number)), slot(number)) / divisors[number];
}

std::array<at::Tensor, 2> FactorInverter::dampings(std::size_t first_slot, const std::array<at::Tensor, 2>& traces,
                                                   double damping) const {
  if (form == InverseForm::kEigen) {
    return {};
  }
  const at::Tensor outputs = traces[0] / static_cast<double>(slot(first_slot).dim);
  const at::Tensor inputs = traces[1] / static_cast<double>(slot(first_slot + 1).dim);
  const at::ScalarType type = statistics->type();
  return {dampingOf(outputs, inputs, damping, type), dampingOf(inputs, outputs, damping, type)};
}

FactorInverse FactorInverter::invert(std::size_t number, const at::Tensor& damping, InverseFailures& failures) const {
  if (slot(number).diagonal) {
    return invertDiagonal(number, damping);
  }
  const at::Tensor factor = statistics->unpacked(mean(number), slot(number));
  return form == InverseForm::kEigen ? decomposeFactor(factor, failures) : invertFactor(factor, damping, failures);
}

FactorInverse FactorInverter::invertDiagonal(std::size_t number, const at::Tensor& damping) const {
  const at::Tensor factor = statistics->unpacked(mean(number), slot(number));
  return {form == InverseForm::kEigen ? factor.clamp_min(0) : (factor + damping).reciprocal(), {}};
}

}  // namespace torchext
