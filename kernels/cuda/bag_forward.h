// The forward pass of the adaptive embedding bag on CUDA, the gradient of its per-sample weights, and the check of a
// batch: what one thread or group does.
//
// A thread makes four columns of one bag: neighbouring threads read neighbouring columns of the same rows. Positions
// are added in rising order, so the sum does not depend on anything. kAhead of them are looked up before the first is
// added: index, then pool are two waits for memory, and a thread has little else to wait with.
#pragma once

#include <cstdint>

#include "kernels/cuda/bag_views.h"

namespace torchext::cuda {

inline constexpr int kAhead = 4;

template <class T>
struct ForwardView {
  BatchView batch;
  TableView table;
  const T* pool;
  const T* weights;      // per sample, or null
  T* output;             // bags x dim
  std::int32_t* argmax;  // bags x dim, the position that gave each maximum, -1 for empty bags; mode max only
};

// Items: bags x quadsOfRow().
template <class T>
struct ForwardItem {
  using M = MathOf<T>;
  ForwardView<T> a;

  TORCHEXT_HD void operator()(std::int64_t item) const {
    const int row_quads = a.table.quadsOfRow();
    const std::int64_t bag = item / row_quads;
    const auto quad_of_row = static_cast<int>(item - bag * row_quads);
    const int chunk = quad_of_row / a.table.quadsOfChunk();
    const Columns at = a.table.columns(quad_of_row - chunk * a.table.quadsOfChunk());
    const bool max = a.batch.mode == cpu::BagMode::kMax;
    Quad<M> result;
    std::int32_t best[kQuad] = {-1, -1, -1, -1};
    std::int64_t count = 0;  // positions of the bag so far
    const std::int64_t end = a.batch.end(bag);
    for (std::int64_t first = a.batch.begin(bag); first < end; first += kAhead) {
      bool counts[kAhead];
      std::int32_t slots[kAhead];
      Quad<M> found[kAhead];
      TORCHEXT_UNROLL
      for (int k = 0; k < kAhead; ++k) {
        const std::int64_t id = first + k < end ? a.batch.id(first + k) : -1;
        counts[k] = a.batch.counts(id);
        slots[k] = counts[k] ? a.table.slotOf(id, chunk) : kAbsent;
      }
      TORCHEXT_UNROLL
      for (int k = 0; k < kAhead; ++k) {
        if (slots[k] != kAbsent) {
          found[k] = loadQuad(a.pool + std::int64_t{slots[k]} * a.table.chunk_dim, at);
        }
      }
      TORCHEXT_UNROLL
      for (int k = 0; k < kAhead; ++k) {
        if (!counts[k]) {
          continue;
        }
        if (max) {
          // Absent chunks read as zero, and a zero can be the maximum.
          keepLarger(result, best, found[k], static_cast<std::int32_t>(first + k), count == 0);
        } else if (slots[k] != kAbsent) {
          addQuad(result, found[k], a.weights == nullptr ? M{1} : Element<T>::load(a.weights[first + k]));
        }
        ++count;
      }
    }
    if (a.batch.mode == cpu::BagMode::kMean && count > 0) {
      scaleQuad(result, M{1} / static_cast<M>(count));
    }
    const std::int64_t to = bag * a.table.dim() + chunk * a.table.chunk_dim;
    storeQuad(a.output + to, at, result);
    for (int k = 0; max && k < at.count; ++k) {
      a.argmax[to + at.column + k] = best[k];
    }
  }

 private:
  static TORCHEXT_HD void keepLarger(Quad<M>& best, std::int32_t* argmax, const Quad<M>& row, std::int32_t position,
                                     bool first) {
    TORCHEXT_UNROLL
    for (int k = 0; k < kQuad; ++k) {
      const bool larger = first || row.value[k] > best.value[k];
      best.value[k] = larger ? row.value[k] : best.value[k];
      argmax[k] = larger ? position : argmax[k];
    }
  }
};

template <class T>
struct WeightGradientView {
  BatchView batch;
  TableView table;
  const T* pool;
  const T* gradient;  // of the output, bags x dim
  T* result;          // a number a position; zero for padding and behind the last bag
};

// Items: positions, a group each.
template <class T>
struct WeightGradientItem {
  using M = MathOf<T>;
  WeightGradientView<T> a;

  template <class Group>
  TORCHEXT_HD void operator()(const Group& group, std::int64_t p) const {
    const std::int64_t id = a.batch.id(p);
    const std::int64_t bag = a.batch.counts(id) ? a.batch.bagOf(p) : -1;
    M sums[Group::kOwn] = {};
    if (bag >= 0) {
      group.each([&](int lane, int own) {
        for (int quad = lane; quad < a.table.quadsOfRow(); quad += group.lanes()) {
          const int chunk = quad / a.table.quadsOfChunk();
          const std::int32_t slot = a.table.slotOf(id, chunk);
          if (slot == kAbsent) {
            continue;
          }
          const Columns at = a.table.columns(quad - chunk * a.table.quadsOfChunk());
          const auto upstream = loadQuad(a.gradient + bag * a.table.dim() + chunk * a.table.chunk_dim, at);
          sums[own] += dotQuad(upstream, loadQuad(a.pool + std::int64_t{slot} * a.table.chunk_dim, at));
        }
      });
    }
    const M sum = group.all(sums, Plus{});
    group.each([&](int lane, int /*own*/) {
      if (lane == 0) {
        a.result[p] = Element<T>::store(sum);
      }
    });
  }
};

// Items: batch.checks(). Sets the flag, from any number of threads at once, if an id or offset is bad.
struct CheckItem {
  BatchView batch;
  std::int32_t* bad;
  TORCHEXT_HD void operator()(std::int64_t i) const {
    if (batch.wrong(i)) {
      *bad = 1;
    }
  }
};

}  // namespace torchext::cuda
