// Four neighbouring columns, the portion that one lane works on: 16 bytes of float, read at once where memory allows.
//
// Elements are float, double and two 16-bit types by their bits; all but double are computed with in float and rounded
// once when stored, as on the CPU (kernels/cpu/element.h).
#pragma once

#include <cstdint>

#include "kernels/cuda/lanes.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#else
#include "kernels/cpu/half.h"
#endif

namespace torchext::cuda {

struct Float16 {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};

template <class T>
struct Element {
  using Math = T;
  static TORCHEXT_HD T load(T value) { return value; }
  static TORCHEXT_HD T store(T value) { return value; }
};

template <>
struct Element<Float16> {
  using Math = float;
#if defined(__CUDACC__)  // exact in, to nearest even out, as cpu/half.h
  static TORCHEXT_HD float load(Float16 value) {
    __half_raw raw;
    raw.x = value.bits;
    return __half2float(__half(raw));
  }
  static TORCHEXT_HD Float16 store(float value) {
    return {static_cast<std::uint16_t>(static_cast<__half_raw>(__float2half_rn(value)).x)};
  }
#else
  static float load(Float16 value) { return cpu::halfToFloat(value.bits); }
  static Float16 store(float value) { return {cpu::floatToHalf(value)}; }
#endif
};

template <>
struct Element<BFloat16> {
  using Math = float;
#if defined(__CUDACC__)
  static TORCHEXT_HD float load(BFloat16 value) {
    __nv_bfloat16_raw raw;
    raw.x = value.bits;
    return __bfloat162float(__nv_bfloat16(raw));
  }
  static TORCHEXT_HD BFloat16 store(float value) {
    return {static_cast<std::uint16_t>(static_cast<__nv_bfloat16_raw>(__float2bfloat16_rn(value)).x)};
  }
#else
  static float load(BFloat16 value) { return cpu::bfloatToFloat(value.bits); }
  static BFloat16 store(float value) { return {cpu::floatToBfloat(value)}; }
#endif
};

template <class T>
using MathOf = typename Element<T>::Math;

inline constexpr int kQuad = 4;
// What memory must be aligned to for whole quads to be read at once; also the widest access that a GPU has.
inline constexpr std::size_t kQuadAlignment = 16;

template <class M>
struct Quad {
  M value[kQuad] = {};
};

template <class T>
struct alignas(kQuad * sizeof(T) < kQuadAlignment ? kQuad * sizeof(T) : kQuadAlignment) PackedQuad {
  T value[kQuad];
};

// Some columns of a row: 1 to 4 of them, from `column` on.
struct Columns {
  int column;
  int count;
  bool whole;  // four, and aligned wherever they are
};

template <class T>
TORCHEXT_HD Quad<MathOf<T>> loadQuad(const T* from, Columns at) {
  Quad<MathOf<T>> quad;
  if (at.whole) {
    const auto packed = *reinterpret_cast<const PackedQuad<T>*>(from + at.column);
    TORCHEXT_UNROLL
    for (int k = 0; k < kQuad; ++k) {
      quad.value[k] = Element<T>::load(packed.value[k]);
    }
    return quad;
  }
  TORCHEXT_UNROLL
  for (int k = 0; k < kQuad; ++k) {
    if (k < at.count) {
      quad.value[k] = Element<T>::load(from[at.column + k]);
    }
  }
  return quad;
}

template <class T>
TORCHEXT_HD void storeQuad(T* to, Columns at, const Quad<MathOf<T>>& quad) {
  if (at.whole) {
    PackedQuad<T> packed;
    TORCHEXT_UNROLL
    for (int k = 0; k < kQuad; ++k) {
      packed.value[k] = Element<T>::store(quad.value[k]);
    }
    *reinterpret_cast<PackedQuad<T>*>(to + at.column) = packed;
    return;
  }
  TORCHEXT_UNROLL
  for (int k = 0; k < kQuad; ++k) {
    if (k < at.count) {
      to[at.column + k] = Element<T>::store(quad.value[k]);
    }
  }
}

// to += factor * from
template <class M>
TORCHEXT_HD void addQuad(Quad<M>& to, const Quad<M>& from, M factor) {
  TORCHEXT_UNROLL
  for (int k = 0; k < kQuad; ++k) {
    to.value[k] += factor * from.value[k];
  }
}

template <class M>
TORCHEXT_HD void scaleQuad(Quad<M>& quad, M factor) {
  TORCHEXT_UNROLL
  for (int k = 0; k < kQuad; ++k) {
    quad.value[k] *= factor;
  }
}

template <class M>
TORCHEXT_HD M dotQuad(const Quad<M>& a, const Quad<M>& b) {
  M sum = 0;
  TORCHEXT_UNROLL
  for (int k = 0; k < kQuad; ++k) {
    sum += a.value[k] * b.value[k];
  }
  return sum;
}

}  // namespace torchext::cuda
