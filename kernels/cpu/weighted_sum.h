// weightedSum: dst[i] = weights[0] * src[0][i] + weights[1] * src[1][i] + ..., the average of decentralized training.
//
// One pass over dst: the sums of a block are kept in registers and first-level cache. Element types: float, double,
// float16, bfloat16 (summed in float, rounded once). dst may be one of the sources, else they do not overlap; sources
// may overlap each other. No alignment is asked for, n may be 0, there is at least one source. One thread: the caller
// owns parallelism.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>

#include "kernels/cpu/element.h"

namespace torchext::cpu {

namespace detail {

inline constexpr std::size_t kSumBlock = 1024;

template <class T>
TORCHEXT_ALWAYS_INLINE void weightedSumLoop(T* dst, std::span<const T* const> src,
                                            std::span<const typename Element<T>::Math> weights, std::size_t n) {
  using E = Element<T>;
  typename E::Math sums[kSumBlock];
  for (std::size_t begin = 0; begin < n; begin += kSumBlock) {
    const std::size_t count = std::min(kSumBlock, n - begin);
    for (std::size_t j = 0; j < src.size(); ++j) {
      const T* from = src[j] + begin;
      const auto weight = weights[j];
      if (j == 0) {
        for (std::size_t i = 0; i < count; ++i) {
          sums[i] = E::load(from[i]) * weight;
        }
      } else {
        for (std::size_t i = 0; i < count; ++i) {
          sums[i] += E::load(from[i]) * weight;
        }
      }
    }
    T* to = dst + begin;
    for (std::size_t i = 0; i < count; ++i) {
      to[i] = E::store(sums[i]);
    }
  }
}

#if TORCHEXT_X86_DISPATCH
template <class T>
TORCHEXT_TARGET_AVX2 void weightedSumAvx2(T* dst, std::span<const T* const> src,
                                          std::span<const typename Element<T>::Math> weights, std::size_t n) {
  weightedSumLoop(dst, src, weights, n);
}
#endif

}  // namespace detail

// src and weights are of equal length.
template <class T>
void weightedSum(T* dst, std::span<const T* const> src, std::span<const typename Element<T>::Math> weights,
                 std::size_t n) {
#if TORCHEXT_X86_DISPATCH
  if (cpuHasAvx2()) {
    return detail::weightedSumAvx2(dst, src, weights, n);
  }
#endif
  detail::weightedSumLoop(dst, src, weights, n);
}

}  // namespace torchext::cpu
