// The inner loops of the embedding bag's passes: n elements of a pool beside n numbers to compute with. Plain loops for
// the compiler to vectorise; any n, no alignment.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/element.h"

namespace torchext::cpu {

template <class T>
using MathOf = typename Element<T>::Math;

// to[i] += factor * from[i]
template <class T, class M>
TORCHEXT_ALWAYS_INLINE void addScaled(M* __restrict to, const T* __restrict from, std::size_t n, M factor) {
  for (std::size_t i = 0; i < n; ++i) {
    to[i] += factor * static_cast<M>(Element<T>::load(from[i]));
  }
}

template <class M>
TORCHEXT_ALWAYS_INLINE void fillZero(M* to, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) {
    to[i] = 0;
  }
}

template <class T, class M>
TORCHEXT_ALWAYS_INLINE void storeScaled(T* __restrict to, const M* __restrict from, std::size_t n, M factor) {
  for (std::size_t i = 0; i < n; ++i) {
    to[i] = Element<T>::store(static_cast<MathOf<T>>(from[i] * factor));
  }
}

// Eight partial sums, whatever the instruction set: the order of additions is the code's, not the compiler's.
template <class T, class M>
TORCHEXT_ALWAYS_INLINE M dot(const M* __restrict a, const T* __restrict b, std::size_t n) {
  constexpr std::size_t kLanes = 8;
  M lanes[kLanes] = {};
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (std::size_t k = 0; k < kLanes; ++k) {
      lanes[k] += a[i + k] * static_cast<M>(Element<T>::load(b[i + k]));
    }
  }
  for (std::size_t k = 0; i + k < n; ++k) {
    lanes[k] += a[i + k] * static_cast<M>(Element<T>::load(b[i + k]));
  }
  return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

// Calls visit(first chunk, slot, chunks) for every stretch of a row's resident chunks that lie side by side in the
// pool.
template <class Visit>
TORCHEXT_ALWAYS_INLINE void forEachRun(const std::int32_t* slots, int chunks, Visit&& visit) {
  for (int c = 0; c < chunks;) {
    if (slots[c] < 0) {
      ++c;
      continue;
    }
    int end = c + 1;
    while (end < chunks && slots[end] == slots[end - 1] + 1) {
      ++end;
    }
    visit(c, slots[c], end - c);
    c = end;
  }
}

// Asks for the lines that a stretch of the pool lies in. All callers up to the loop must be inlined, lambdas too: GCC
// takes a function that only prefetches for one without effect, and drops calls of it.
template <class T>
TORCHEXT_ALWAYS_INLINE void prefetchRange(const T* from, std::size_t n) {
  const auto* bytes = reinterpret_cast<const char*>(from);
  for (std::size_t at = 0; at < n * sizeof(T); at += 64) {
    __builtin_prefetch(bytes + at);
  }
}

}  // namespace torchext::cpu
