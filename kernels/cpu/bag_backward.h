// The backward pass of the adaptive embedding bag: the gradient of each distinct row, summed over its positions, handed
// chunk by chunk to a sink (an optimizer's update, a dense gradient, a sparse one), and the utility of all its chunks,
// resident or not.
//
// A row is handled once, by one thread, its positions in rising order: the result does not depend on the number of
// threads.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>
#include <type_traits>

#include "csrc/core/embedding/chunk_index.h"
#include "csrc/core/embedding/chunk_utility.h"
#include "kernels/bag_batch.h"
#include "kernels/buffer.h"
#include "kernels/cpu/bag_groups.h"
#include "kernels/cpu/bag_loops.h"
#include "kernels/cpu/bag_rows.h"

namespace torchext::cpu {

template <class T>
struct BackwardArgs {
  const BagBatch& batch;
  const GroupedIds& grouped;
  const core::ChunkIndex& index;
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

// The gradient of one row, dim numbers: in `sum`, or where it lies already.
template <class T, class M>
TORCHEXT_ALWAYS_INLINE const M* rowGradient(const BackwardArgs<T>& a, std::size_t group, std::size_t dim, M* sum) {
  const std::uint32_t begin = a.grouped.starts[group];
  const std::uint32_t end = a.grouped.starts[group + 1];
  if constexpr (std::is_same_v<T, M>) {
    if (end - begin == 1 && a.batch.mode == BagMode::kSum && a.weights == nullptr) {  // most rows of most batches
      return a.gradient + a.bag_of[static_cast<std::uint32_t>(a.grouped.entries[begin])] * dim;
    }
  }
  fillZero(sum, dim);
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
  return sum;
}

struct BackwardKernel {
  // The gradient of a row's positions is nearer than the pool, and asked for later.
  static constexpr std::size_t kGradientAhead = 6;

  // Groups begin..end-1.
  template <class T, class Width, class Sink>
  static TORCHEXT_ALWAYS_INLINE void run(const BackwardArgs<T>& a, const Width& chunk_dim, const Sink& sink,
                                         const std::size_t& begin, const std::size_t& end) {
    using M = MathOf<T>;
    const auto chunks = static_cast<std::size_t>(a.index.chunks());
    const std::size_t dim = chunk_dim * chunks;
    Buffer<M> scratch(dim + chunks);
    M* const sum = scratch.data();
    M* const squares = sum + dim;  // of each chunk
    Buffer<float> own_amounts(chunks);
    const auto row_of = [&](std::size_t group) __attribute__((always_inline)) { return a.grouped.idOf(group); };
    const auto prefetch = [&](std::size_t slot) __attribute__((always_inline)) { sink.prefetch(slot, chunk_dim); };
    RowChunks rows(a.index, begin, end, row_of, prefetch);
    for (std::size_t group = begin; group < end; ++group) {
      if (a.utility != nullptr && group + rows.kAhead < end) {
        a.utility->prefetch(static_cast<std::int64_t>(row_of(group + rows.kAhead)) * a.index.chunks());
      }
      if (group + kGradientAhead < end) {
        const auto p = static_cast<std::uint32_t>(a.grouped.entries[a.grouped.starts[group + kGradientAhead]]);
        prefetchRangeSoon(a.gradient + a.bag_of[p] * dim, dim);
      }
      const M* const gradient = rowGradient(a, group, dim, sum);
      for (std::size_t c = 0; c < chunks; ++c) {
        squares[c] = dot(gradient + c * chunk_dim, gradient + c * chunk_dim, chunk_dim);
      }
      if (a.utility != nullptr) {
        float* const amounts = a.amounts != nullptr ? a.amounts + group * chunks : own_amounts.data();
        const auto accesses = static_cast<float>(a.grouped.starts[group + 1] - a.grouped.starts[group]);
        for (std::size_t c = 0; c < chunks; ++c) {
          amounts[c] = accesses * std::sqrt(static_cast<float>(squares[c])) * a.utility_factor;
        }
        if (a.amounts == nullptr) {
          a.utility->addRow(static_cast<std::int64_t>(row_of(group)) * a.index.chunks(), {amounts, chunks}, a.step);
        }
      }
      sink.beginRow(group);
      for (const auto [chunk, slot] : rows.at(group)) {
        const auto c = static_cast<std::size_t>(chunk);
        sink.apply(static_cast<std::size_t>(slot), chunk_dim, gradient + c * chunk_dim, squares[c]);
      }
      rows.advance(group);
    }
  }
};

}  // namespace torchext::cpu
