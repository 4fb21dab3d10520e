// The forward pass of the adaptive embedding bag, and the gradient of its per-sample weights.
//
// Rows lie anywhere in the pool, so a pass waits for memory unless it asks early: the index is asked for two blocks
// ahead, the pool one block (kAhead rows) ahead of where the sums are.
#pragma once

#include <limits>
#include <vector>

#include "csrc/core/chunk_index.h"
#include "kernels/cpu/bag_batch.h"
#include "kernels/cpu/bag_loops.h"

namespace torchext::cpu {

// Looks up positions in order, kAhead before they are used. Asked for position p, then p + 1, ...
template <class T>
class LookAhead {
 public:
  static constexpr std::int64_t kAhead = 16;

  LookAhead(const core::ChunkIndex& index, const std::vector<std::uint32_t>& ids, const T* pool, std::size_t chunk_dim,
            std::int64_t begin, std::int64_t end)
      : index_(index),
        ids_(ids.data()),
        pool_(pool),
        chunk_dim_(chunk_dim),
        end_(end),
        ring_(static_cast<std::size_t>(kAhead * index.chunks())) {
    for (std::int64_t p = begin; p < std::min(end, begin + 2 * kAhead); ++p) {
      index_.prefetch(ids_[p]);
    }
    for (std::int64_t p = begin; p < std::min(end, begin + kAhead); ++p) {
      find(p);
    }
  }

  // The slots of position p's row.
  TORCHEXT_ALWAYS_INLINE const std::int32_t* at(std::int64_t p) const { return ring(p); }
  // Position p is done; its place in the ring goes to p + kAhead.
  TORCHEXT_ALWAYS_INLINE void advance(std::int64_t p) {
    if (p + 2 * kAhead < end_) {
      index_.prefetch(ids_[p + 2 * kAhead]);
    }
    if (p + kAhead < end_) {
      find(p + kAhead);
    }
  }

 private:
  TORCHEXT_ALWAYS_INLINE std::int32_t* ring(std::int64_t p) const {
    return const_cast<std::int32_t*>(ring_.data()) + p % kAhead * index_.chunks();
  }
  TORCHEXT_ALWAYS_INLINE void find(std::int64_t p) {
    std::int32_t* slots = ring(p);
    index_.findRow(ids_[p], slots);
    forEachRun(
        slots, index_.chunks(), [&](int, std::int32_t slot, int chunks) __attribute__((always_inline)) {
          prefetchRange(pool_ + static_cast<std::size_t>(slot) * chunk_dim_,
                        static_cast<std::size_t>(chunks) * chunk_dim_);
        });
  }

  const core::ChunkIndex& index_;
  const std::uint32_t* ids_;
  const T* pool_;
  std::size_t chunk_dim_;
  std::int64_t end_;
  std::vector<std::int32_t> ring_;
};

template <class T>
struct ForwardArgs {
  const BagBatch& batch;
  const core::ChunkIndex& index;
  const T* pool;
  std::size_t chunk_dim;
  const T* weights;      // per sample, or null
  T* output;             // bags x dim
  std::int32_t* argmax;  // bags x dim, the position that gave each maximum, -1 for empty bags; mode max only
};

struct ForwardKernel {
  // Bags begin..end-1.
  template <class T>
  static TORCHEXT_ALWAYS_INLINE void run(const ForwardArgs<T>& a, const std::int64_t& begin, const std::int64_t& end) {
    using M = MathOf<T>;
    const int chunks = a.index.chunks();
    const std::size_t dim = a.chunk_dim * static_cast<std::size_t>(chunks);
    const auto& offsets = a.batch.offsets;
    LookAhead<T> rows(a.index, a.batch.ids, a.pool, a.chunk_dim, offsets[static_cast<std::size_t>(begin)],
                      offsets[static_cast<std::size_t>(end)]);
    std::vector<M> sums(dim);
    M* const sum = sums.data();
    for (std::int64_t bag = begin; bag < end; ++bag) {
      const auto b = static_cast<std::size_t>(bag);
      fillZero(sum, dim);
      std::int64_t count = 0;
      for (std::int64_t p = offsets[b]; p < offsets[b + 1]; ++p) {
        if (static_cast<std::int64_t>(a.batch.ids[static_cast<std::size_t>(p)]) != a.batch.padding) {
          if (a.batch.mode == BagMode::kMax) {
            maximum(a, sum, a.argmax + b * dim, rows.at(p), p, count == 0);
          } else {
            const M weight = a.weights == nullptr ? M{1} : static_cast<M>(Element<T>::load(a.weights[p]));
            forEachRun(
                rows.at(p), chunks, [&](int c, std::int32_t slot, int n) __attribute__((always_inline)) {
                  addScaled(sum + static_cast<std::size_t>(c) * a.chunk_dim,
                            a.pool + static_cast<std::size_t>(slot) * a.chunk_dim,
                            static_cast<std::size_t>(n) * a.chunk_dim, weight);
                });
          }
          ++count;
        }
        rows.advance(p);
      }
      if (a.batch.mode == BagMode::kMax && count == 0) {
        for (std::size_t d = 0; d < dim; ++d) {
          a.argmax[b * dim + d] = -1;
        }
      }
      const bool mean = a.batch.mode == BagMode::kMean && count > 0;
      storeScaled(a.output + b * dim, sum, dim, mean ? M{1} / static_cast<M>(count) : M{1});
    }
  }

 private:
  // Absent chunks read as zero, and a zero can be the maximum.
  template <class T, class M>
  static TORCHEXT_ALWAYS_INLINE void maximum(const ForwardArgs<T>& a, M* best, std::int32_t* argmax,
                                             const std::int32_t* slots, std::int64_t position, bool first) {
    for (int c = 0; c < a.index.chunks(); ++c) {
      const T* from = slots[c] < 0 ? nullptr : a.pool + static_cast<std::size_t>(slots[c]) * a.chunk_dim;
      for (std::size_t i = 0; i < a.chunk_dim; ++i) {
        const M value = from == nullptr ? M{0} : static_cast<M>(Element<T>::load(from[i]));
        const std::size_t d = static_cast<std::size_t>(c) * a.chunk_dim + i;
        if (first || value > best[d]) {
          best[d] = value;
          argmax[d] = static_cast<std::int32_t>(position);
        }
      }
    }
  }
};

template <class T>
struct WeightGradientArgs {
  const BagBatch& batch;
  const core::ChunkIndex& index;
  const T* pool;
  std::size_t chunk_dim;
  const T* gradient;  // of the output, bags x dim
  T* result;          // a number a position; 0 for padding
};

struct WeightGradientKernel {
  template <class T>
  static TORCHEXT_ALWAYS_INLINE void run(const WeightGradientArgs<T>& a, const std::int64_t& begin,
                                         const std::int64_t& end) {
    using M = MathOf<T>;
    const std::size_t dim = a.chunk_dim * static_cast<std::size_t>(a.index.chunks());
    const auto& offsets = a.batch.offsets;
    LookAhead<T> rows(a.index, a.batch.ids, a.pool, a.chunk_dim, offsets[static_cast<std::size_t>(begin)],
                      offsets[static_cast<std::size_t>(end)]);
    std::vector<M> upstream(dim);
    for (std::int64_t bag = begin; bag < end; ++bag) {
      const auto b = static_cast<std::size_t>(bag);
      fillZero(upstream.data(), dim);
      addScaled(upstream.data(), a.gradient + b * dim, dim, M{1});
      for (std::int64_t p = offsets[b]; p < offsets[b + 1]; ++p) {
        M sum = 0;
        if (static_cast<std::int64_t>(a.batch.ids[static_cast<std::size_t>(p)]) != a.batch.padding) {
          forEachRun(
              rows.at(p), a.index.chunks(), [&](int c, std::int32_t slot, int n) __attribute__((always_inline)) {
                sum += dot(upstream.data() + static_cast<std::size_t>(c) * a.chunk_dim,
                           a.pool + static_cast<std::size_t>(slot) * a.chunk_dim,
                           static_cast<std::size_t>(n) * a.chunk_dim);
              });
        }
        a.result[p] = Element<T>::store(sum);
        rows.advance(p);
      }
    }
  }
};

}  // namespace torchext::cpu
