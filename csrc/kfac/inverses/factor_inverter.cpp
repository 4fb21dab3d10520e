#include "kfac/inverses/factor_inverter.h"

namespace torchext {

at::Tensor FactorInverter::mean(std::size_t number) const {
  const at::Tensor sum = accumulator->slice(factors, layout(number));
  return divisors[number] == 1 ? sum : sum / divisors[number];
}

at::Tensor FactorInverter::traces(std::size_t number) const {
  return accumulator->traces(accumulator->slice(factors, layout(number)), layout(number)) / divisors[number];
}

std::array<at::Tensor, 2> FactorInverter::dampings(std::size_t first_factor, const std::array<at::Tensor, 2>& traces,
                                                   double damping) const {
  if (form == InverseForm::kEigen) {
    return {};
  }
  const at::Tensor outputs = traces[0] / static_cast<double>(layout(first_factor).dim);
  const at::Tensor inputs = traces[1] / static_cast<double>(layout(first_factor + 1).dim);
  return {accumulator->damping(outputs, inputs, damping), accumulator->damping(inputs, outputs, damping)};
}

FactorInverse FactorInverter::invert(std::size_t number, const at::Tensor& damping, InverseFailures& failures) const {
  if (layout(number).diagonal) {
    return invertDiagonal(number, damping);
  }
  const FactorLayout& of = layout(number);
  return form == InverseForm::kEigen
             ? decomposeFactor(accumulator->unpacked(mean(number), of), failures)
             : invertFactor(accumulator->slice(factors, of), of.dim, divisors[number], damping, failures);
}

FactorInverse FactorInverter::invertDiagonal(std::size_t number, const at::Tensor& damping) const {
  const at::Tensor factor = accumulator->unpacked(mean(number), layout(number));
  return {form == InverseForm::kEigen ? factor.clamp_min(0) : (factor + damping).reciprocal(), {}};
}

}  // namespace torchext
