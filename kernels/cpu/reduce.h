// sumInto: the arithmetic of a ring reduction, dst[i] += src[i].
//
// Element types: float, double, float16, bfloat16 (both summed in float and rounded once per call), int32, int64 and
// the other integers (wrapping). dst and src do not overlap. No alignment is asked for, n may be 0. One thread: the
// caller owns parallelism.
#pragma once

#include <cstddef>

#include "kernels/cpu/element.h"

namespace torchext::cpu {

namespace detail {

template <class T>
TORCHEXT_ALWAYS_INLINE void sumLoop(T* __restrict dst, const T* __restrict src, std::size_t n) {
  using E = Element<T>;
  for (std::size_t i = 0; i < n; ++i) {
    dst[i] = E::store(static_cast<typename E::Math>(E::load(dst[i]) + E::load(src[i])));
  }
}

#if TORCHEXT_X86_DISPATCH
template <class T>
TORCHEXT_TARGET_AVX2 void sumAvx2(T* __restrict dst, const T* __restrict src, std::size_t n) {
  std::size_t done = 0;
  if constexpr (kIsHalf<T>) {
    for (; done + 8 <= n; done += 8) {
      auto* to = reinterpret_cast<__m128i*>(dst + done);
      const __m256 a = _mm256_cvtph_ps(_mm_loadu_si128(to));
      const __m256 b = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src + done)));
      _mm_storeu_si128(to, _mm256_cvtps_ph(_mm256_add_ps(a, b), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
  }
  sumLoop(dst + done, src + done, n - done);
}
#endif

}  // namespace detail

template <class T>
void sumInto(T* dst, const T* src, std::size_t n) {
#if TORCHEXT_X86_DISPATCH
  if (cpuHasAvx2()) {
    return detail::sumAvx2(dst, src, n);
  }
#endif
  detail::sumLoop(dst, src, n);
}

}  // namespace torchext::cpu
