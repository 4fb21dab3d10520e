#include "kfac/linalg/reductions.h"

#include <bit>
#include <type_traits>

#include "kernels/cpu/isa.h"

namespace torchext {

namespace {

// By the bits of the exponent: a sum would not be vectorised, as its order must be kept.
struct FiniteLoop {
  template <class T>
  static TORCHEXT_ALWAYS_INLINE bool run(const T* data, std::int64_t count) {
    using Bits = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;
    constexpr Bits kExponent = sizeof(T) == 4 ? Bits(0x7f800000U) : Bits(0x7ff0000000000000ULL);
    Bits found = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      found |= static_cast<Bits>((std::bit_cast<Bits>(data[i]) & kExponent) == kExponent);
    }
    return found == 0;
  }
};

struct DotLoop {
  template <class T>
  static TORCHEXT_ALWAYS_INLINE double run(const T* a, std::int64_t stride_a, const T* b, std::int64_t stride_b,
                                           std::int64_t rows, std::int64_t columns) {
    constexpr std::int64_t kLanes = 32;
    constexpr std::int64_t kSums = 8;
    T lanes[kLanes] = {};
    for (std::int64_t row = 0; row < rows; ++row, a += stride_a, b += stride_b) {
      std::int64_t i = 0;
      for (; i + kLanes <= columns; i += kLanes) {
        for (std::int64_t lane = 0; lane < kLanes; ++lane) {
          lanes[lane] += a[i + lane] * b[i + lane];
        }
      }
      for (std::int64_t lane = 0; i < columns; ++i, ++lane) {
        lanes[lane] += a[i] * b[i];
      }
    }
    double sums[kSums] = {};
    for (std::int64_t lane = 0; lane < kLanes; lane += kSums) {
      for (std::int64_t i = 0; i < kSums; ++i) {
        sums[i] += static_cast<double>(lanes[lane + i]);
      }
    }
    double sum = 0;
    for (const double part : sums) {
      sum += part;
    }
    return sum;
  }
};

}  // namespace

template <class T>
bool allFinite(const T* data, std::int64_t count) {
  return cpu::onLoopIsa<FiniteLoop>(data, count);
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
double dotProduct(const T* a, std::int64_t stride_a, const T* b, std::int64_t stride_b, std::int64_t rows,
                  std::int64_t columns) {
  return cpu::onLoopIsa<DotLoop>(a, stride_a, b, stride_b, rows, columns);
}

template <class T>
double dotProduct(const T* a, const T* b, std::int64_t count) {
  return dotProduct(a, count, b, count, 1, count);
}

template bool allFinite<float>(const float*, std::int64_t);
template bool allFinite<double>(const double*, std::int64_t);
template double dotProduct<float>(const float*, const float*, std::int64_t);
template double dotProduct<double>(const double*, const double*, std::int64_t);
template double dotProduct<float>(const float*, std::int64_t, const float*, std::int64_t, std::int64_t, std::int64_t);
template double dotProduct<double>(const double*, std::int64_t, const double*, std::int64_t, std::int64_t,
                                   std::int64_t);

}  // namespace torchext
