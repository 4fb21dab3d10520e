// Element is what a loop needs to know about an element type: the type it computes in, and the way there and back.
#pragma once

#include <concepts>
#include <cstdint>
#include <type_traits>

#include "kernels/cpu/half.h"

// torch's 16-bit types join when torch is on the include path; without it the loops stand alone.
#if __has_include(<c10/util/Half.h>)
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#define TORCHEXT_HAS_C10_TYPES 1
#else
#define TORCHEXT_HAS_C10_TYPES 0
#endif

namespace torchext::cpu {

// The 16-bit types of builds without torch: the same bits as c10::Half and c10::BFloat16.
struct Half {
  std::uint16_t x;
};
struct BFloat16 {
  std::uint16_t x;
};

template <class T>
inline constexpr bool kIsHalf = std::is_same_v<T, Half>;
template <class T>
inline constexpr bool kIsBFloat16 = std::is_same_v<T, BFloat16>;
#if TORCHEXT_HAS_C10_TYPES
template <>
inline constexpr bool kIsHalf<c10::Half> = true;
template <>
inline constexpr bool kIsBFloat16<c10::BFloat16> = true;
#endif

template <class T>
struct Element {
  static_assert(std::floating_point<T>, "an element is float, double, float16, bfloat16 or an integer");
  using Math = T;
  static TORCHEXT_ALWAYS_INLINE Math load(T value) { return value; }
  static TORCHEXT_ALWAYS_INLINE T store(Math value) { return value; }
};

template <class T>
requires kIsHalf<T>
struct Element<T> {
  using Math = float;
  static TORCHEXT_ALWAYS_INLINE Math load(T value) { return halfToFloat(value.x); }
  static TORCHEXT_ALWAYS_INLINE T store(Math value) {
    T result;
    result.x = floatToHalf(value);
    return result;
  }
};

template <class T>
requires kIsBFloat16<T>
struct Element<T> {
  using Math = float;
  static TORCHEXT_ALWAYS_INLINE Math load(T value) { return bfloatToFloat(value.x); }
  static TORCHEXT_ALWAYS_INLINE T store(Math value) {
    T result;
    result.x = floatToBfloat(value);
    return result;
  }
};

// Integers wrap around, as torch's sums do; unsigned arithmetic makes that defined.
template <class T>
requires std::integral<T>
struct Element<T> {
  using Math = std::make_unsigned_t<T>;
  static TORCHEXT_ALWAYS_INLINE Math load(T value) { return static_cast<Math>(value); }
  static TORCHEXT_ALWAYS_INLINE T store(Math value) { return static_cast<T>(value); }
};

}  // namespace torchext::cpu
