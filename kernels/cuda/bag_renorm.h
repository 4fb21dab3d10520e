// torch's embedding_renorm_ on CUDA: rows whose norm exceeds max_norm are scaled by max_norm / (norm + 1e-7), each once
// however often it is in the batch.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/cuda/bag_backward.h"

namespace torchext::cuda {

template <class T>
struct RenormView {
  RunsView runs;
  TableView table;
  T* pool;
  double max_norm;
  double norm_type;  // above 0; may be infinite
};

// Items: sorted positions, a group each.
template <class T>
struct RenormItem {
  using M = MathOf<T>;
  RenormView<T> a;

  template <class Group>
  TORCHEXT_HD void operator()(const Group& group, std::int64_t i) const {
    if (!a.runs.beginsAt(i)) {
      return;
    }
    const std::int64_t row = a.runs.keys[i];
    const bool infinite = std::isinf(a.norm_type);
    double parts[Group::kOwn] = {};
    group.each([&](int lane, int own) {
      forEachQuad(row, lane, group.lanes(), [&](T* chunk, Columns at) {
        const Quad<M> quad = loadQuad(chunk, at);
        for (int k = 0; k < at.count; ++k) {
          const double value = std::abs(static_cast<double>(quad.value[k]));
          parts[own] = infinite ? Larger{}(parts[own], value) : parts[own] + powered(value);
        }
      });
    });
    const double whole = infinite ? group.all(parts, Larger{}) : group.all(parts, Plus{});
    const double norm = infinite || a.norm_type == 1 ? whole
                        : a.norm_type == 2           ? std::sqrt(whole)
                                                     : std::pow(whole, 1 / a.norm_type);
    if (!(norm > a.max_norm)) {
      return;
    }
    const auto factor = static_cast<M>(a.max_norm / (norm + 1e-7));
    group.each([&](int lane, int /*own*/) {
      forEachQuad(row, lane, group.lanes(), [&](T* chunk, Columns at) {
        Quad<M> quad = loadQuad(chunk, at);
        scaleQuad(quad, factor);
        storeQuad(chunk, at, quad);
      });
    });
  }

 private:
  TORCHEXT_HD double powered(double value) const {
    return a.norm_type == 2 ? value * value : a.norm_type == 1 ? value : std::pow(value, a.norm_type);
  }

  // visit(resident chunk, columns) for the quads of a row that are this lane's.
  template <class Visit>
  TORCHEXT_HD void forEachQuad(std::int64_t row, int lane, int lanes, Visit&& visit) const {
    const int chunk_quads = a.table.quadsOfChunk();
    for (int quad = lane; quad < a.table.quadsOfRow(); quad += lanes) {
      const int chunk = quad / chunk_quads;
      const std::int32_t slot = a.table.slotOf(row, chunk);
      if (slot != kAbsent) {
        visit(a.pool + std::int64_t{slot} * a.table.chunk_dim, a.table.columns(quad - chunk * chunk_quads));
      }
    }
  }
};

}  // namespace torchext::cuda
