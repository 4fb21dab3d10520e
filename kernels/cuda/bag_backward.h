// The backward pass of the adaptive embedding bag on CUDA: what one thread or group does. The order of the passes is in
// bag_run.h.
//
//   1. KeyItem        each position: the row it belongs to is its key, rows where it belongs to none; its bag
//      InverseItem    each bag, mode mean: 1 / its entries
//   2. a stable sort of the keys with their positions: a row's positions are one run, in rising order
//   3. PartialItem    runs longer than a piece: a piece is kPiece sorted positions, and a run that comes into a piece
//                     from the one before leaves the sum of its part there; a thread makes four columns
//   4. ChunkItem      each (sorted position, chunk), a group: nothing unless a run begins at the position. Sums its
//                     gradient (the positions in the run's first piece, then the sums that later pieces left), collects
//                     utility (of absent chunks in a sketch: bag_sketch.h), and applies the update if the chunk is
//                     resident
// How a run is cut depends on the keys alone: results are the same from run to run, and a row that all bags share costs
// n / kPiece steps and not n.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/cuda/bag_forward.h"
#include "kernels/cuda/bag_update.h"
#include "kernels/cuda/bag_utility.h"
#include "kernels/cuda/bag_views.h"

namespace torchext::cuda {

inline constexpr std::int64_t kPiece = 128;

// Positions grouped by row: what steps 1 and 2 leave.
struct RunsView {
  const std::uint32_t* keys;   // sorted; `rows` and above: no row
  const std::int32_t* order;   // the position behind each key
  const std::int32_t* bag_of;  // of each position, -1: none
  std::int64_t count;          // positions
  std::uint32_t rows;

  // Whether a row's run begins at sorted position i.
  TORCHEXT_HD bool beginsAt(std::int64_t i) const { return keys[i] < rows && (i == 0 || keys[i - 1] != keys[i]); }

  // The end of the run that sorted position i is in, at most `most`.
  TORCHEXT_HD std::int64_t endOf(std::int64_t i, std::int64_t most) const {
    const std::uint32_t key = keys[i];
    std::int64_t low = i;  // in the run; most runs are short, so the steps grow from one
    std::int64_t step = 1;
    while (low + step < most && keys[low + step] == key) {
      low += step;
      step *= 2;
    }
    std::int64_t high = low + step < most ? low + step : most;
    while (low + 1 < high) {
      const std::int64_t middle = low + (high - low) / 2;
      if (keys[middle] == key) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return high;
  }
};

// Items: positions.
struct KeyItem {
  BatchView batch;
  std::uint32_t* keys;
  std::int32_t* order;
  std::int32_t* bag_of;

  TORCHEXT_HD void operator()(std::int64_t p) const {
    const std::int32_t bag = batch.bagOf(p);
    const std::int64_t id = batch.id(p);
    bag_of[p] = bag;
    order[p] = static_cast<std::int32_t>(p);
    keys[p] = static_cast<std::uint32_t>(bag >= 0 && batch.counts(id) ? id : batch.rows);
  }
};

// Items: bags.
template <class M>
struct InverseItem {
  BatchView batch;
  M* inverse;

  TORCHEXT_HD void operator()(std::int64_t bag) const {
    std::int64_t count = 0;
    const std::int64_t end = batch.end(bag);
    for (std::int64_t p = batch.begin(bag); p < end; ++p) {
      count += batch.counts(batch.id(p)) ? 1 : 0;
    }
    inverse[bag] = count > 0 ? static_cast<M>(1.0 / static_cast<double>(count)) : M{0};
  }
};

template <class T>
struct BackwardView {
  cpu::BagMode mode;
  TableView table;
  RunsView runs;
  const T* gradient;           // of the output, bags x dim
  const T* weights;            // per sample, or null
  const std::int32_t* argmax;  // mode max
  const MathOf<T>* inverse;    // mode mean
  MathOf<T>* partial;          // pieces x dim; that of piece 0 is never used
  bool scale_by_frequency;     // divide a row's gradient by its number of positions
  UtilityView utility;
  float* grown;  // of each (sorted position, chunk), for absent ones of a sketch: what utility grows by; else null
  UpdateView<T> update;
};

// Adds the gradients of sorted positions begin..end-1, which are of one row; four columns of the row from `offset` on.
template <class T>
TORCHEXT_HD void addPositions(const BackwardView<T>& a, std::int64_t begin, std::int64_t end, int offset, Columns at,
                              Quad<MathOf<T>>& sum) {
  using M = MathOf<T>;
  for (std::int64_t first = begin; first < end; first += kAhead) {
    Quad<M> found[kAhead];
    M factors[kAhead];
    TORCHEXT_UNROLL
    for (int k = 0; k < kAhead; ++k) {
      factors[k] = 1;
      if (first + k >= end) {
        continue;
      }
      const std::int32_t p = a.runs.order[first + k];
      const std::int64_t bag = a.runs.bag_of[p];
      const std::int64_t from = bag * a.table.dim() + offset;
      found[k] = loadQuad(a.gradient + from, at);
      if (a.mode == cpu::BagMode::kMax) {
        for (int c = 0; c < at.count; ++c) {
          found[k].value[c] = a.argmax[from + at.column + c] == p ? found[k].value[c] : M{0};
        }
      } else if (a.weights != nullptr) {
        factors[k] = Element<T>::load(a.weights[p]);
      } else if (a.mode == cpu::BagMode::kMean) {
        factors[k] = a.inverse[bag];
      }
    }
    TORCHEXT_UNROLL
    for (int k = 0; k < kAhead; ++k) {
      if (first + k < end) {
        addQuad(sum, found[k], factors[k]);
      }
    }
  }
}

// Items: pieces x quadsOfRow().
template <class T>
struct PartialItem {
  BackwardView<T> a;

  TORCHEXT_HD void operator()(std::int64_t item) const {
    const int row_quads = a.table.quadsOfRow();
    const std::int64_t piece = item / row_quads;
    const std::int64_t begin = piece * kPiece;
    if (piece == 0 || a.runs.keys[begin] >= a.runs.rows || a.runs.keys[begin - 1] != a.runs.keys[begin]) {
      return;
    }
    const auto quad_of_row = static_cast<int>(item - piece * row_quads);
    const int chunk = quad_of_row / a.table.quadsOfChunk();
    const Columns at = a.table.columns(quad_of_row - chunk * a.table.quadsOfChunk());
    const std::int64_t most = begin + kPiece < a.runs.count ? begin + kPiece : a.runs.count;
    Quad<MathOf<T>> sum;
    const int offset = chunk * a.table.chunk_dim;
    addPositions(a, begin, a.runs.endOf(begin, most), offset, at, sum);
    storeQuad(a.partial + piece * a.table.dim() + offset, at, sum);
  }
};

// Items: positions x chunks, a group each.
template <class T>
struct ChunkItem {
  using M = MathOf<T>;
  BackwardView<T> a;

  template <class Group>
  TORCHEXT_HD void operator()(const Group& group, std::int64_t item) const {
    const std::int64_t begin = item / a.table.chunks;
    const auto chunk = static_cast<int>(item - begin * a.table.chunks);
    if (!a.runs.beginsAt(begin)) {
      return;
    }
    const std::int64_t row = a.runs.keys[begin];
    const std::int32_t slot = a.table.slotOf(row, chunk);
    if (!a.utility.kept() && (slot == kAbsent || a.update.kind == Update::kNone)) {
      return;
    }
    const std::int64_t end = a.runs.endOf(begin, a.runs.count);
    const int quads = a.table.quadsOfChunk();
    Quad<M> gradient[Group::kOwn];
    M squares[Group::kOwn] = {};
    // A group has a lane for each quad, unless a chunk has more than kMostLanes: then they are made once for the sum of
    // squares and again for the update.
    const bool once = quads <= group.lanes();
    if (once || a.utility.kept() || a.update.needsSquares()) {
      group.each([&](int lane, int own) {
        for (int quad = lane; quad < quads; quad += group.lanes()) {
          gradient[own] = gradientOf(begin, end, chunk, quad);
          squares[own] += dotQuad(gradient[own], gradient[own]);
        }
      });
    }
    const M sum_of_squares = group.all(squares, Plus{});
    if (a.utility.kept()) {
      group.each([&](int lane, int /*own*/) {
        if (lane == 0) {
          const auto accesses = static_cast<float>(end - begin);
          const float grown = accesses * std::sqrt(static_cast<float>(sum_of_squares)) * a.utility.factor;
          if (a.utility.sketched() && slot == kAbsent) {
            a.grown[item] = grown;
          } else {
            a.utility.add(row * a.table.chunks + chunk, slot, grown);
          }
        }
      });
    }
    if (slot == kAbsent || a.update.kind == Update::kNone) {
      return;
    }
    M rates[Group::kOwn] = {};
    group.each([&](int lane, int own) {
      if (lane == 0) {
        rates[own] = a.update.begin(slot, item, sum_of_squares, a.table.chunk_dim);
      }
    });
    const M rate = group.first(rates);
    group.each([&](int lane, int own) {
      for (int quad = lane; quad < quads; quad += group.lanes()) {
        if (!once) {
          gradient[own] = gradientOf(begin, end, chunk, quad);
        }
        a.update.apply(slot, item, a.table.chunk_dim, a.table.columns(quad), gradient[own], rate);
      }
    });
  }

 private:
  // Of a row whose run is begin..end-1.
  TORCHEXT_HD Quad<M> gradientOf(std::int64_t begin, std::int64_t end, int chunk, int quad) const {
    const Columns at = a.table.columns(quad);
    const int offset = chunk * a.table.chunk_dim;
    std::int64_t next = (begin / kPiece + 1) * kPiece;
    Quad<M> sum;
    addPositions(a, begin, next < end ? next : end, offset, at, sum);
    for (; next < end; next += kPiece) {
      addQuad(sum, loadQuad(a.partial + next / kPiece * a.table.dim() + offset, at), M{1});
    }
    if (a.scale_by_frequency) {
      scaleQuad(sum, M{1} / static_cast<M>(end - begin));
    }
    return sum;
  }
};

// Items: positions x chunks. Marks the resident chunks of the rows in the batch, each once: their places in a sparse
// gradient follow from the marks before them.
struct MarkItem {
  RunsView runs;
  TableView table;
  std::int32_t* marks;

  TORCHEXT_HD void operator()(std::int64_t item) const {
    const std::int64_t i = item / table.chunks;
    const auto chunk = static_cast<int>(item - i * table.chunks);
    marks[item] = runs.beginsAt(i) && table.slotOf(runs.keys[i], chunk) != kAbsent ? 1 : 0;
  }
};

}  // namespace torchext::cuda
