// The backward pass of the adaptive embedding bag: the gradient of each distinct row, summed over its positions, handed
// chunk by chunk to a sink (an optimizer's update, a dense gradient, a sparse one), and the utility of all its chunks,
// resident or not.
//
// A row is handled once, by one thread, its positions in rising order: the result does not depend on the number of
// threads. A sink's apply(slot, gradient, squares) gets the sum of squares that the utility needs anyway.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "csrc/core/chunk_index.h"
#include "csrc/core/chunk_utility.h"
#include "kernels/cpu/bag_batch.h"
#include "kernels/cpu/bag_loops.h"

namespace torchext::cpu {

template <class T>
struct BackwardArgs {
  const BagBatch& batch;
  const GroupedIds& grouped;
  const core::ChunkIndex& index;
  std::size_t chunk_dim;
  const T* gradient;             // of the output, bags x dim
  const T* weights;              // per sample, or null
  const std::int32_t* argmax;    // mode max
  const std::uint32_t* bag_of;   // of each position
  const double* inverse_counts;  // of each bag, mode mean
  bool scale_by_frequency;       // divide a row's gradient by its number of positions
  core::ChunkUtility* utility;   // or null
  float utility_factor;          // gamma^-n
  std::uint64_t step;
  float* amounts;  // groups x chunks: what each chunk's utility grows by, kept for later; or null
};

// The gradient of one row, dim numbers.
template <class T, class M>
TORCHEXT_ALWAYS_INLINE void rowGradient(const BackwardArgs<T>& a, std::size_t group, std::size_t dim, M* sum) {
  fillZero(sum, dim);
  const std::uint32_t begin = a.grouped.starts[group];
  const std::uint32_t end = a.grouped.starts[group + 1];
  for (std::uint32_t i = begin; i < end; ++i) {
    const auto p = static_cast<std::uint32_t>(a.grouped.entries[i]);
    const std::size_t bag = a.bag_of[p];
    const T* from = a.gradient + bag * dim;
    if (a.batch.mode == BagMode::kMax) {
      const std::int32_t* argmax = a.argmax + bag * dim;
      for (std::size_t d = 0; d < dim; ++d) {
        sum[d] += argmax[d] == static_cast<std::int32_t>(p) ? static_cast<M>(Element<T>::load(from[d])) : M{0};
      }
      continue;
    }
    M factor = 1;
    if (a.weights != nullptr) {
      factor = static_cast<M>(Element<T>::load(a.weights[p]));
    } else if (a.batch.mode == BagMode::kMean) {
      factor = static_cast<M>(a.inverse_counts[bag]);
    }
    addScaled(sum, from, dim, factor);
  }
  if (a.scale_by_frequency) {
    const M factor = M{1} / static_cast<M>(end - begin);
    for (std::size_t d = 0; d < dim; ++d) {
      sum[d] *= factor;
    }
  }
}

struct BackwardKernel {
  static constexpr std::size_t kAhead = 12;

  // Groups begin..end-1.
  template <class T, class Sink>
  static TORCHEXT_ALWAYS_INLINE void run(const BackwardArgs<T>& a, const Sink& sink, const std::size_t& begin,
                                         const std::size_t& end) {
    using M = MathOf<T>;
    const int chunks = a.index.chunks();
    const auto per_row = static_cast<std::size_t>(chunks);
    const std::size_t dim = a.chunk_dim * per_row;
    std::vector<M> sums(dim);
    std::vector<std::int32_t> ring(kAhead * per_row);
    const auto prefetch = [&](std::size_t group) __attribute__((always_inline)) {
      if (group < end) {
        const std::uint32_t id = a.grouped.idOf(group);
        a.index.prefetch(id);
        if (a.utility != nullptr) {
          a.utility->prefetch(static_cast<std::int64_t>(id) * chunks);
        }
      }
    };
    const auto find = [&](std::size_t group) __attribute__((always_inline)) {
      if (group < end) {
        std::int32_t* slots = ring.data() + group % kAhead * per_row;
        a.index.findRow(a.grouped.idOf(group), slots);
        forEachRun(
            slots, chunks, [&](int, std::int32_t slot, int n) __attribute__((always_inline)) {
              sink.prefetch(static_cast<std::size_t>(slot), static_cast<std::size_t>(n));
            });
      }
    };
    for (std::size_t group = begin; group < std::min(end, begin + 2 * kAhead); ++group) {
      prefetch(group);
    }
    for (std::size_t group = begin; group < std::min(end, begin + kAhead); ++group) {
      find(group);
    }
    for (std::size_t group = begin; group < end; ++group) {
      rowGradient(a, group, dim, sums.data());
      const std::int32_t* slots = ring.data() + group % kAhead * per_row;
      const auto accesses = static_cast<float>(a.grouped.starts[group + 1] - a.grouped.starts[group]);
      const std::int64_t first_key = static_cast<std::int64_t>(a.grouped.idOf(group)) * chunks;
      sink.beginRow(group);
      for (int c = 0; c < chunks; ++c) {
        const M* gradient = sums.data() + static_cast<std::size_t>(c) * a.chunk_dim;
        const M squares = dot(gradient, gradient, a.chunk_dim);
        if (slots[c] >= 0) {
          sink.apply(static_cast<std::size_t>(slots[c]), gradient, squares);
        }
        const float amount = accesses * std::sqrt(static_cast<float>(squares)) * a.utility_factor;
        if (a.amounts != nullptr) {
          a.amounts[group * per_row + static_cast<std::size_t>(c)] = amount;
        } else if (a.utility != nullptr) {
          a.utility->add(first_key + c, slots[c], amount, a.step);
        }
      }
      prefetch(group + 2 * kAhead);
      find(group + kAhead);
    }
  }
};

}  // namespace torchext::cpu
