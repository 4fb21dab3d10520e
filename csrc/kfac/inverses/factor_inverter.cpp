#include "kfac/inverses/factor_inverter.h"

#include <cmath>

namespace torchext {
namespace {

// Of a factor, by its mean eigenvalue and that of the layer's other one; on the CPU. Loops: a dozen of ATen's operators
// on a number each take as long as the Cholesky decomposition of a small factor.
template <class T>
at::Tensor dampingOf(const at::Tensor& own_mean, const at::Tensor& other_mean, double damping) {
  at::Tensor result = at::empty({own_mean.numel()}, at::TensorOptions(c10::CppTypeToScalarType<T>::value));
  const auto* own = own_mean.const_data_ptr<double>();
  const auto* other = other_mean.const_data_ptr<double>();
  for (std::int64_t group = 0; group < result.numel(); ++group) {
    const double pi = std::sqrt(own[group] / other[group]);
    const double balance = std::isfinite(pi) && pi > 0 ? pi : 1;
    result.mutable_data_ptr<T>()[group] = static_cast<T>(balance * std::sqrt(damping));
  }
  return result;
}

// The same, queued.
at::Tensor deviceDampingOf(const at::Tensor& own_mean, const at::Tensor& other_mean, double damping,
                           at::ScalarType type) {
  at::Tensor pi = at::sqrt(own_mean / other_mean);
  pi = at::where(at::isfinite(pi).logical_and(pi > 0), pi, at::ones_like(pi));
  return (pi * std::sqrt(damping)).to(type);
}

}  // namespace

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
  const at::ScalarType type = accumulator->type();
  if (device_path) {
    return {deviceDampingOf(outputs, inputs, damping, type), deviceDampingOf(inputs, outputs, damping, type)};
  }
  const auto damping_of = type == at::kDouble ? &dampingOf<double> : &dampingOf<float>;
  return {damping_of(outputs, inputs, damping), damping_of(inputs, outputs, damping)};
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
