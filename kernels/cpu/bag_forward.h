// The forward pass of the adaptive embedding bag, and the gradient of its per-sample weights.
#pragma once

#include <algorithm>
#include <span>

#include "csrc/core/embedding/chunk_index.h"
#include "kernels/bag_batch.h"
#include "kernels/buffer.h"
#include "kernels/cpu/bag_loops.h"
#include "kernels/cpu/bag_rows.h"

namespace torchext::cpu {

// Walks through bags begin..end-1: use(bag, position, chunks) for every position that is not padding, then after(bag).
// Both must be TORCHEXT_ALWAYS_INLINE.
template <class T, class Width, class Use, class After>
TORCHEXT_ALWAYS_INLINE void forEachBag(const BagBatch& batch, const core::ChunkIndex& index, const T* pool,
                                       Width chunk_dim, std::int64_t begin, std::int64_t end, const Use& use,
                                       const After& after) {
  const std::uint32_t* ids = batch.ids.data();
  const std::int64_t* offsets = batch.offsets.data();
  const auto row_of = [=](std::size_t p) __attribute__((always_inline)) { return ids[p]; };
  const auto prefetch = [=](std::size_t slot) __attribute__((always_inline)) {
    prefetchRange(pool + slot * chunk_dim, chunk_dim);
  };
  RowChunks rows(index, static_cast<std::size_t>(offsets[begin]), static_cast<std::size_t>(offsets[end]), row_of,
                 prefetch);
  for (std::int64_t bag = begin; bag < end; ++bag) {
    const auto last = static_cast<std::size_t>(offsets[bag + 1]);
    for (auto p = static_cast<std::size_t>(offsets[bag]); p < last; ++p) {
      if (static_cast<std::int64_t>(ids[p]) != batch.padding) {
        use(static_cast<std::size_t>(bag), p, rows.at(p));
      }
      rows.advance(p);
    }
    after(static_cast<std::size_t>(bag));
  }
}

template <class T>
struct ForwardArgs {
  const BagBatch& batch;
  const core::ChunkIndex& index;
  const T* pool;
  const T* weights;      // per sample, or null
  T* output;             // bags x dim
  std::int32_t* argmax;  // bags x dim, the position that gave each maximum, -1 for empty bags; mode max only
};

struct ForwardKernel {
  // Bags begin..end-1.
  template <class T, class Width>
  static TORCHEXT_ALWAYS_INLINE void run(const ForwardArgs<T>& a, const Width& chunk_dim, const std::int64_t& begin,
                                         const std::int64_t& end) {
    using M = MathOf<T>;
    const std::size_t dim = chunk_dim * static_cast<std::size_t>(a.index.chunks());
    Buffer<M> scratch(2 * dim);
    M* const sum = scratch.data();  // of the bag so far; its maximum in mode max
    M* const row = sum + dim;
    std::size_t count = 0;  // positions of the bag so far
    const auto add = [&](std::span<const ResidentChunk> chunks, M weight, M * to) __attribute__((always_inline)) {
      for (const auto [chunk, slot] : chunks) {
        addScaled(to + static_cast<std::size_t>(chunk) * chunk_dim, a.pool + static_cast<std::size_t>(slot) * chunk_dim,
                  chunk_dim, weight);
      }
    };
    const auto use = [&](std::size_t bag, std::size_t p, std::span<const ResidentChunk> chunks)
        __attribute__((always_inline)) {
      if (a.batch.mode == BagMode::kMax) {
        fillZero(row, dim);  // absent chunks read as zero, and a zero can be the maximum
        add(chunks, M{1}, row);
        keepLarger(sum, a.argmax + bag * dim, row, dim, static_cast<std::int32_t>(p), count == 0);
      } else {
        add(chunks, a.weights == nullptr ? M{1} : static_cast<M>(Element<T>::load(a.weights[p])), sum);
      }
      ++count;
    };
    const auto after = [&](std::size_t bag) __attribute__((always_inline)) {
      if (a.batch.mode == BagMode::kMax && count == 0) {
        std::fill_n(a.argmax + bag * dim, dim, -1);
      }
      const bool mean = a.batch.mode == BagMode::kMean && count > 0;
      storeScaled(a.output + bag * dim, sum, dim, mean ? M{1} / static_cast<M>(count) : M{1});
      fillZero(sum, dim);
      count = 0;
    };
    fillZero(sum, dim);
    forEachBag(a.batch, a.index, a.pool, chunk_dim, begin, end, use, after);
  }

 private:
  template <class M>
  static TORCHEXT_ALWAYS_INLINE void keepLarger(M* best, std::int32_t* argmax, const M* row, std::size_t dim,
                                                std::int32_t position, bool first) {
    for (std::size_t d = 0; d < dim; ++d) {
      const bool larger = first || row[d] > best[d];
      best[d] = larger ? row[d] : best[d];
      argmax[d] = larger ? position : argmax[d];
    }
  }
};

template <class T>
struct WeightGradientArgs {
  const BagBatch& batch;
  const core::ChunkIndex& index;
  const T* pool;
  const T* gradient;  // of the output, bags x dim
  T* result;          // a number a position, zeros before: padding keeps them
};

struct WeightGradientKernel {
  // Bags begin..end-1.
  template <class T, class Width>
  static TORCHEXT_ALWAYS_INLINE void run(const WeightGradientArgs<T>& a, const Width& chunk_dim,
                                         const std::int64_t& begin, const std::int64_t& end) {
    using M = MathOf<T>;
    const std::size_t dim = chunk_dim * static_cast<std::size_t>(a.index.chunks());
    const auto use = [&](std::size_t bag, std::size_t p, std::span<const ResidentChunk> chunks)
        __attribute__((always_inline)) {
      const T* upstream = a.gradient + bag * dim;
      M sum = 0;
      for (const auto [chunk, slot] : chunks) {
        sum += dot(upstream + static_cast<std::size_t>(chunk) * chunk_dim,
                   a.pool + static_cast<std::size_t>(slot) * chunk_dim, chunk_dim);
      }
      a.result[p] = Element<T>::store(sum);
    };
    forEachBag(a.batch, a.index, a.pool, chunk_dim, begin, end, use, [](std::size_t) __attribute__((always_inline)){});
  }
};

}  // namespace torchext::cpu
