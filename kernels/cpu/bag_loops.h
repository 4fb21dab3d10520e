// The inner loops of the embedding bag's passes: n elements of a pool beside n numbers to compute with. Plain loops for
// the compiler to vectorise; any n, no alignment. A Width is std::size_t, an integral_constant or Sixteens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/cpu/element.h"

namespace torchext::cpu {

template <class T>
using MathOf = typename Element<T>::Math;

// A number of columns that is known to be a multiple of 16: loops over floats then have no ends to look after, which
// cost short rows as much as the middle.
struct Sixteens {
  std::size_t count;
  TORCHEXT_ALWAYS_INLINE operator std::size_t() const { return 16 * count; }  // NOLINT(*-explicit-*): it is a width
};

// Calls body(width) with the columns of a chunk: a constant for common widths, a Sixteens for other multiples. Not a
// constant 16, because GCC unrolls so short a loop before it looks for vectors, and then finds none.
template <class T, class Body>
void withWidth(std::size_t chunk_dim, Body&& body) {
  if constexpr (std::is_same_v<T, float>) {
    switch (chunk_dim) {
      case 32:
        return body(std::integral_constant<std::size_t, 32>{});
      case 64:
        return body(std::integral_constant<std::size_t, 64>{});
      case 128:
        return body(std::integral_constant<std::size_t, 128>{});
      default:
        break;
    }
    if (chunk_dim % 16 == 0) {
      return body(Sixteens{chunk_dim / 16});
    }
  }
  body(chunk_dim);
}

// to[i] += factor * from[i]
template <class T, class M, class Width>
TORCHEXT_ALWAYS_INLINE void addScaled(M* __restrict to, const T* __restrict from, Width n, M factor) {
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

template <class T, class M, class Width>
TORCHEXT_ALWAYS_INLINE void storeScaled(T* __restrict to, const M* __restrict from, Width n, M factor) {
  for (std::size_t i = 0; i < n; ++i) {
    to[i] = Element<T>::store(static_cast<MathOf<T>>(from[i] * factor));
  }
}

// Eight partial sums, whatever the instruction set: the order of additions is the code's, not the compiler's.
template <class A, class B, class Width>
TORCHEXT_ALWAYS_INLINE MathOf<A> dot(const A* __restrict a, const B* __restrict b, Width n) {
  static_assert(std::is_same_v<MathOf<A>, MathOf<B>>);
  using M = MathOf<A>;
  constexpr std::size_t kLanes = 8;
  M lanes[kLanes] = {};
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (std::size_t k = 0; k < kLanes; ++k) {
      lanes[k] += static_cast<M>(Element<A>::load(a[i + k])) * static_cast<M>(Element<B>::load(b[i + k]));
    }
  }
  for (std::size_t k = 0; i + k < n; ++k) {
    lanes[k] += static_cast<M>(Element<A>::load(a[i + k])) * static_cast<M>(Element<B>::load(b[i + k]));
  }
  return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

// Asks for the lines that n elements lie in, long before they are needed: into the second level of the cache, because
// processors wait for more lines there at once than at the first (an EPYC of the 4th generation reads random rows of
// 256 bytes at 13 GB/s so, at 8 GB/s otherwise), and the first would forget them in the meantime.
//
// All callers up to the loop must be inlined, lambdas too: GCC takes a function that only prefetches for one without
// effect, and drops calls of it.
template <class T, class Width>
TORCHEXT_ALWAYS_INLINE void prefetchRange(const T* from, Width n) {
  const auto* bytes = reinterpret_cast<const char*>(from);
  for (std::size_t at = 0; at < n * sizeof(T); at += 64) {
    __builtin_prefetch(bytes + at, 0, 2);
  }
}

// The same shortly before they are needed, into the first level.
template <class T, class Width>
TORCHEXT_ALWAYS_INLINE void prefetchRangeSoon(const T* from, Width n) {
  const auto* bytes = reinterpret_cast<const char*>(from);
  for (std::size_t at = 0; at < n * sizeof(T); at += 64) {
    __builtin_prefetch(bytes + at);
  }
}

}  // namespace torchext::cpu
