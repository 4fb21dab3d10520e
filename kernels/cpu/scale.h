// scaleInto: dst[i] = scale * src[i], the arithmetic of multi_tensor_average_.
//
// Element types: float, double, float16, bfloat16 (multiplied in float, rounded once). dst and src do not overlap.
// No alignment is asked for, n may be 0. One thread: the caller owns parallelism.
#pragma once

#include <cstddef>

#include "kernels/cpu/element.h"

namespace torchext::cpu {

namespace detail {

template <class T>
TORCHEXT_ALWAYS_INLINE void scaleLoop(T* __restrict dst, const T* __restrict src, std::size_t n,
                                      typename Element<T>::Math scale) {
  using E = Element<T>;
  for (std::size_t i = 0; i < n; ++i) {
    dst[i] = E::store(E::load(src[i]) * scale);
  }
}

#if TORCHEXT_X86_DISPATCH
template <class T>
TORCHEXT_TARGET_AVX2 void scaleAvx2(T* __restrict dst, const T* __restrict src, std::size_t n,
                                    typename Element<T>::Math scale) {
  std::size_t done = 0;
  if constexpr (kIsHalf<T>) {
    const __m256 factor = _mm256_set1_ps(scale);
    for (; done + 8 <= n; done += 8) {
      const __m256 value = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src + done)));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + done),
                       _mm256_cvtps_ph(_mm256_mul_ps(value, factor), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
  }
  scaleLoop(dst + done, src + done, n - done, scale);
}
#endif

}  // namespace detail

template <class T>
void scaleInto(T* dst, const T* src, std::size_t n, typename Element<T>::Math scale) {
#if TORCHEXT_X86_DISPATCH
  if (cpuHasAvx2()) {
    return detail::scaleAvx2(dst, src, n, scale);
  }
#endif
  detail::scaleLoop(dst, src, n, scale);
}

}  // namespace torchext::cpu
