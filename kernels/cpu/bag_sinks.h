// Sinks take the gradient of a chunk from the backward pass: three fused optimizers, two kinds of gradient, or nothing.
//
// beginRow(group) comes before a row's chunks; prefetch(slot, width), long before them, asks for what apply() will
// touch; apply(slot, width, gradient, squares) takes the gradient of one chunk and the sum of its squares.
//
// Optimizer state is float32 beside any pool of 16- or 32-bit elements (float64 beside float64). All are lazy: a chunk
// without a gradient in a step keeps weight and state.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/cpu/bag_loops.h"

namespace torchext::cpu {

// w -= lr g
template <class T>
struct SgdSink {
  using M = MathOf<T>;
  T* pool;
  M lr;

  TORCHEXT_ALWAYS_INLINE void beginRow(std::size_t /*group*/) const {}
  template <class Width>
  TORCHEXT_ALWAYS_INLINE void prefetch(std::size_t slot, Width width) const {
    prefetchRange(pool + slot * width, width);
  }
  template <class Width>
  TORCHEXT_ALWAYS_INLINE void apply(std::size_t slot, Width width, const M* __restrict gradient, M /*squares*/) const {
    T* __restrict to = pool + slot * width;
    for (std::size_t i = 0; i < width; ++i) {
      to[i] = Element<T>::store(Element<T>::load(to[i]) - lr * gradient[i]);
    }
  }
};

// s += mean(g^2) over the chunk;  w -= lr g / (sqrt(s) + eps). With one chunk a row this is row-wise Adagrad.
template <class T>
struct AdagradSink {
  using M = MathOf<T>;
  T* pool;
  M* sums;  // one a slot
  M lr;
  M eps;

  TORCHEXT_ALWAYS_INLINE void beginRow(std::size_t /*group*/) const {}
  template <class Width>
  TORCHEXT_ALWAYS_INLINE void prefetch(std::size_t slot, Width width) const {
    prefetchRange(pool + slot * width, width);
    prefetchRange(sums + slot, std::size_t{1});
  }
  template <class Width>
  TORCHEXT_ALWAYS_INLINE void apply(std::size_t slot, Width width, const M* __restrict gradient, M squares) const {
    sums[slot] += squares / static_cast<M>(static_cast<std::size_t>(width));
    const M rate = lr / (std::sqrt(sums[slot]) + eps);
    T* __restrict to = pool + slot * width;
    for (std::size_t i = 0; i < width; ++i) {
      to[i] = Element<T>::store(Element<T>::load(to[i]) - rate * gradient[i]);
    }
  }
};

// torch.optim.SparseAdam: moments of a chunk move in the steps that touch it; the bias is corrected by all steps.
template <class T>
struct AdamSink {
  using M = MathOf<T>;
  T* pool;
  M* first;   // slots x width
  M* second;  // the same
  M rate;     // lr sqrt(1 - beta2^t) / (1 - beta1^t)
  M beta1;
  M beta2;
  M eps;

  TORCHEXT_ALWAYS_INLINE void beginRow(std::size_t /*group*/) const {}
  template <class Width>
  TORCHEXT_ALWAYS_INLINE void prefetch(std::size_t slot, Width width) const {
    prefetchRange(pool + slot * width, width);
    prefetchRange(first + slot * width, width);
    prefetchRange(second + slot * width, width);
  }
  template <class Width>
  TORCHEXT_ALWAYS_INLINE void apply(std::size_t slot, Width width, const M* __restrict gradient, M /*squares*/) const {
    T* __restrict to = pool + slot * width;
    M* __restrict m = first + slot * width;
    M* __restrict v = second + slot * width;
    for (std::size_t i = 0; i < width; ++i) {
      m[i] += (M{1} - beta1) * (gradient[i] - m[i]);
      v[i] += (M{1} - beta2) * (gradient[i] * gradient[i] - v[i]);
      to[i] = Element<T>::store(Element<T>::load(to[i]) - rate * m[i] / (std::sqrt(v[i]) + eps));
    }
  }
};

// The gradient of the whole pool, which starts as zeros.
template <class T>
struct DenseSink {
  using M = MathOf<T>;
  T* result;

  TORCHEXT_ALWAYS_INLINE void beginRow(std::size_t /*group*/) const {}
  template <class Width>
  TORCHEXT_ALWAYS_INLINE void prefetch(std::size_t slot, Width width) const {
    prefetchRange(result + slot * width, width);
  }
  template <class Width>
  TORCHEXT_ALWAYS_INLINE void apply(std::size_t slot, Width width, const M* __restrict gradient, M /*squares*/) const {
    storeScaled(result + slot * width, gradient, width, M{1});
  }
};

// The gradient of the touched slots: values[i] belongs to slot slots[i].
template <class T>
struct SparseSink {
  using M = MathOf<T>;
  const std::int64_t* starts;  // of each group's chunks in the result
  std::int64_t* slots;
  T* values;
  mutable std::int64_t at = 0;

  TORCHEXT_ALWAYS_INLINE void beginRow(std::size_t group) const { at = starts[group]; }
  template <class Width>
  TORCHEXT_ALWAYS_INLINE void prefetch(std::size_t /*slot*/, Width /*width*/) const {}
  template <class Width>
  TORCHEXT_ALWAYS_INLINE void apply(std::size_t slot, Width width, const M* __restrict gradient, M /*squares*/) const {
    slots[at] = static_cast<std::int64_t>(slot);
    storeScaled(values + at * static_cast<std::int64_t>(width), gradient, width, M{1});
    ++at;
  }
};

// Collects utility and nothing else.
template <class T>
struct NoSink {
  TORCHEXT_ALWAYS_INLINE void beginRow(std::size_t /*group*/) const {}
  template <class Width>
  TORCHEXT_ALWAYS_INLINE void prefetch(std::size_t /*slot*/, Width /*width*/) const {}
  template <class Width>
  TORCHEXT_ALWAYS_INLINE void apply(std::size_t /*slot*/, Width /*width*/, const MathOf<T>* /*gradient*/,
                                    MathOf<T> /*squares*/) const {}
};

}  // namespace torchext::cpu
