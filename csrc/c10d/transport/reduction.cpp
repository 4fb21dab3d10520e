#include "c10d/transport/reduction.h"

#include <type_traits>

#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

namespace torchext {
namespace {

// 16-bit types are added and scaled in float, rounded once.
template <class T>
using Accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <class T>
void add(void* destination, const void* source, std::size_t count) {
  auto* __restrict d = static_cast<T*>(destination);
  const auto* __restrict s = static_cast<const T*>(source);
  for (std::size_t i = 0; i < count; ++i) {
    d[i] = static_cast<T>(static_cast<Accumulator<T>>(d[i]) + static_cast<Accumulator<T>>(s[i]));
  }
}

template <class T>
void addScaled(void* destination, const void* source, std::size_t count, double scale) {
  auto* __restrict d = static_cast<T*>(destination);
  const auto* __restrict s = static_cast<const T*>(source);
  const auto k = static_cast<Accumulator<T>>(scale);
  for (std::size_t i = 0; i < count; ++i) {
    d[i] = static_cast<T>((static_cast<Accumulator<T>>(d[i]) + static_cast<Accumulator<T>>(s[i])) * k);
  }
}

template <class T>
void multiply(void* destination, std::size_t count, double scale) {
  auto* __restrict d = static_cast<T*>(destination);
  const auto k = static_cast<Accumulator<T>>(scale);
  for (std::size_t i = 0; i < count; ++i) {
    d[i] = static_cast<T>(static_cast<Accumulator<T>>(d[i]) * k);
  }
}

template <class T>
constexpr Reduction kReduction{sizeof(T), add<T>, addScaled<T>, multiply<T>};

}  // namespace

const Reduction& reductionFor(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Float:
      return kReduction<float>;
    case c10::ScalarType::Double:
      return kReduction<double>;
    case c10::ScalarType::Half:
      return kReduction<c10::Half>;
    case c10::ScalarType::BFloat16:
      return kReduction<c10::BFloat16>;
    default:
      TORCH_CHECK_TYPE(false, "partial averages take float32, float64, float16 or bfloat16 tensors, got ",
                       c10::toString(dtype), "; average a converted copy, or all_reduce it");
  }
}

}  // namespace torchext
