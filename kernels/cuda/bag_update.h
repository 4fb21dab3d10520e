// bag_update applies the gradient of a resident chunk: three fused optimizers, two kinds of gradient, or nothing. The
// arithmetic is that of kernels/cpu/bag_sinks.h, four columns at a time.
//
// begin(), by one lane, touches what a chunk has once and says by what the gradient is multiplied; apply(), by a lane
// for each quad, does the rest.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/cuda/float4.h"

namespace torchext::cuda {

enum class Update { kNone, kSgd, kAdagrad, kAdam, kDense, kSparse };

template <class T>
struct UpdateView {
  using M = MathOf<T>;
  Update kind = Update::kNone;
  T* pool = nullptr;    // the optimizers
  M* first = nullptr;   // Adagrad: sums of squares, one a slot; Adam: first moments, slots x chunk_dim
  M* second = nullptr;  // Adam: second moments
  M rate = 0;           // the learning rate; Adam: with the correction of the bias
  M beta1 = 0;
  M beta2 = 0;
  M eps = 0;
  T* values = nullptr;                   // kDense: slots x chunk_dim, zeros before; kSparse: touched chunks x chunk_dim
  std::int64_t* slots = nullptr;         // kSparse: of each value
  const std::int32_t* places = nullptr;  // kSparse: of each (sorted position, chunk), counted from 1

  TORCHEXT_HD bool needsSquares() const { return kind == Update::kAdagrad; }

  TORCHEXT_HD M begin(std::int32_t slot, std::int64_t item, M squares, int chunk_dim) const {
    if (kind == Update::kAdagrad) {
      const M sum = first[slot] + squares / static_cast<M>(chunk_dim);
      first[slot] = sum;
      return rate / (std::sqrt(sum) + eps);
    }
    if (kind == Update::kSparse) {
      slots[places[item] - 1] = slot;
    }
    return rate;
  }

  TORCHEXT_HD void apply(std::int32_t slot, std::int64_t item, int chunk_dim, Columns at, const Quad<M>& gradient,
                         M factor) const {
    const std::int64_t to = std::int64_t{slot} * chunk_dim;
    switch (kind) {
      case Update::kNone:
        return;
      case Update::kSgd:
      case Update::kAdagrad: {
        Quad<M> value = loadQuad(pool + to, at);
        TORCHEXT_UNROLL
        for (int k = 0; k < kQuad; ++k) {
          value.value[k] -= factor * gradient.value[k];
        }
        storeQuad(pool + to, at, value);
        return;
      }
      case Update::kAdam:
        adam(to, at, gradient, factor);
        return;
      case Update::kDense:
        storeQuad(values + to, at, gradient);
        return;
      case Update::kSparse:
        storeQuad(values + (std::int64_t{places[item]} - 1) * chunk_dim, at, gradient);
        return;
    }
  }

 private:
  TORCHEXT_HD void adam(std::int64_t to, Columns at, const Quad<M>& gradient, M factor) const {
    Quad<M> value = loadQuad(pool + to, at);
    Quad<M> m = loadQuad(first + to, at);
    Quad<M> v = loadQuad(second + to, at);
    TORCHEXT_UNROLL
    for (int k = 0; k < kQuad; ++k) {
      const M g = gradient.value[k];
      m.value[k] += (M{1} - beta1) * (g - m.value[k]);
      v.value[k] += (M{1} - beta2) * (g * g - v.value[k]);
      if (k < at.count) {
        value.value[k] -= factor * m.value[k] / (std::sqrt(v.value[k]) + eps);
      }
    }
    storeQuad(first + to, at, m);
    storeQuad(second + to, at, v);
    storeQuad(pool + to, at, value);
  }
};

}  // namespace torchext::cuda
