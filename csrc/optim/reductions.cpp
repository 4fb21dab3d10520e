#include "optim/reductions.h"

#include <array>
#include <bit>
#include <type_traits>

namespace torchext {

// By the bits of the exponent: a sum would not be vectorised, as its order must be kept.
template <class T>
bool allFinite(const T* data, std::int64_t count) {
  using Bits = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;
  constexpr Bits kExponent = sizeof(T) == 4 ? Bits(0x7f800000U) : Bits(0x7ff0000000000000ULL);
  Bits found = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    found |= static_cast<Bits>((std::bit_cast<Bits>(data[i]) & kExponent) == kExponent);
  }
  return found == 0;
}

bool isFinite(const at::Tensor& tensor) {
  if (tensor.is_cpu() && tensor.is_contiguous() && tensor.scalar_type() == at::kFloat) {
    return allFinite(tensor.const_data_ptr<float>(), tensor.numel());
  }
  if (tensor.is_cpu() && tensor.is_contiguous() && tensor.scalar_type() == at::kDouble) {
    return allFinite(tensor.const_data_ptr<double>(), tensor.numel());
  }
  const at::Tensor values = tensor.layout() == at::kStrided ? tensor : tensor._values();
  return at::isfinite(values).all().item<bool>();
}

template <class T>
double dotProduct(const T* a, const T* b, std::int64_t count) {
  constexpr std::int64_t kLanes = 16;
  std::array<T, kLanes> sums{};
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      sums[static_cast<std::size_t>(lane)] += a[i + lane] * b[i + lane];
    }
  }
  double sum = 0;
  for (const T lane : sums) {
    sum += static_cast<double>(lane);
  }
  for (; i < count; ++i) {
    sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  }
  return sum;
}

template bool allFinite<float>(const float*, std::int64_t);
template bool allFinite<double>(const double*, std::int64_t);
template double dotProduct<float>(const float*, const float*, std::int64_t);
template double dotProduct<double>(const double*, const double*, std::int64_t);

}  // namespace torchext
