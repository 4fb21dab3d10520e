// The order of the passes of each operator, for any device: the GPU (device_run.h), or the loops of a test.
//
// A device has
//   forEach(count, item)               item(i) for i = 0 .. count - 1, in any order or all at once
//   forEachGroup(count, lanes, item)   item(group, i), with a group of so many lanes each (lanes.h)
//   sort(keys, sorted, positions, order, count, bits, memory, bytes)   stable, by the lowest bits of the keys
// What is called later begins when all that was called before has ended.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/bag_backward.h"
#include "kernels/cuda/bag_forward.h"
#include "kernels/cuda/bag_renorm.h"
#include "kernels/cuda/bag_sketch.h"
#include "kernels/cuda/bag_utility.h"

namespace torchext::cuda {

// The memory that a backward pass needs besides its arguments.
struct Workspace {
  std::uint32_t* keys = nullptr;  // these five: one a position
  std::uint32_t* sorted = nullptr;
  std::int32_t* positions = nullptr;
  std::int32_t* order = nullptr;
  std::int32_t* bag_of = nullptr;
  void* inverse = nullptr;         // numbers to compute with, one a bag
  void* partial = nullptr;         // the same, pieces x dim
  std::uint32_t* cells = nullptr;  // these five: one a (position, chunk) where utility is in a sketch
  std::uint32_t* sorted_cells = nullptr;
  std::int32_t* items = nullptr;
  std::int32_t* item_order = nullptr;
  float* grown = nullptr;
  void* sort = nullptr;
  std::size_t sort_bytes = 0;
  std::size_t bytes = 0;  // of all of it

  RunsView runs(const BatchView& batch) const {
    return {sorted, order, bag_of, batch.positions, static_cast<std::uint32_t>(batch.rows)};
  }
};

// The bits that keys have, 0 .. rows; at least one.
inline int keyBits(std::int64_t rows) { return static_cast<int>(std::bit_width(static_cast<std::uint64_t>(rows | 1))); }

inline std::int64_t pieces(std::int64_t positions) { return (positions + kPiece - 1) / kPiece; }

// What a workspace must have room for.
struct WorkspaceSizes {
  std::int64_t positions = 0;
  std::int64_t bags = 0;       // where each gets an inverse count, else 0
  std::int64_t dim = 0;        // columns of a row where runs are summed, else 0
  std::int64_t sketched = 0;   // positions x chunks where utility is in a sketch, else 0; less than 2^31
  std::size_t math_bytes = 0;  // of a number to compute with
  std::size_t sort_bytes = 0;  // the longer of the two sorts
};

// Cuts a workspace from one allocation that starts at `base`, aligned to 256; with null only to learn how many bytes it
// takes.
inline Workspace layOut(void* base, const WorkspaceSizes& sizes) {
  constexpr std::size_t kAlignment = 256;
  Workspace space;
  const auto take = [&](std::size_t bytes) -> void* {
    const std::size_t begin = space.bytes;
    space.bytes += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return base == nullptr ? nullptr : static_cast<char*>(base) + begin;
  };
  const std::size_t each = static_cast<std::size_t>(sizes.positions) * sizeof(std::int32_t);
  space.keys = static_cast<std::uint32_t*>(take(each));
  space.sorted = static_cast<std::uint32_t*>(take(each));
  space.positions = static_cast<std::int32_t*>(take(each));
  space.order = static_cast<std::int32_t*>(take(each));
  space.bag_of = static_cast<std::int32_t*>(take(each));
  space.inverse = take(static_cast<std::size_t>(sizes.bags) * sizes.math_bytes);
  space.partial = take(static_cast<std::size_t>(pieces(sizes.positions) * sizes.dim) * sizes.math_bytes);
  const std::size_t each_item = static_cast<std::size_t>(sizes.sketched) * sizeof(std::int32_t);
  space.cells = static_cast<std::uint32_t*>(take(each_item));
  space.sorted_cells = static_cast<std::uint32_t*>(take(each_item));
  space.items = static_cast<std::int32_t*>(take(each_item));
  space.item_order = static_cast<std::int32_t*>(take(each_item));
  space.grown = static_cast<float*>(take(each_item));
  space.sort = take(sizes.sort_bytes);
  space.sort_bytes = sizes.sort_bytes;
  return space;
}

template <class Device>
void runCheck(Device& device, const BatchView& batch, std::int32_t* bad) {
  device.forEach(batch.checks(), CheckItem{batch, bad});
}

template <class T, class Device>
void runForward(Device& device, const ForwardView<T>& view) {
  device.forEach(view.batch.bags * view.table.quadsOfRow(), ForwardItem<T>{view});
}

template <class T, class Device>
void runWeightGradient(Device& device, const WeightGradientView<T>& view) {
  device.forEachGroup(view.batch.positions, lanesFor(view.table.quadsOfRow()), WeightGradientItem<T>{view});
}

// Fills the first five arrays of the workspace; afterwards space.runs(batch) is what the other passes read.
template <class Device>
void runGrouping(Device& device, const BatchView& batch, const Workspace& space) {
  device.forEach(batch.positions, KeyItem{batch, space.keys, space.positions, space.bag_of});
  device.sort(space.keys, space.sorted, space.positions, space.order, batch.positions, keyBits(batch.rows), space.sort,
              space.sort_bytes);
}

template <class Device>
void runMarks(Device& device, const RunsView& runs, const TableView& table, std::int32_t* marks) {
  device.forEach(runs.count * table.chunks, MarkItem{runs, table, marks});
}

// After runGrouping in the same workspace. Fills its inverse (mode mean), partial and, with a sketch, the rest, where
// the view points to.
template <class T, class Device>
void runBackward(Device& device, const BatchView& batch, const BackwardView<T>& view, const Workspace& space) {
  if (view.mode == cpu::BagMode::kMean) {
    device.forEach(batch.bags, InverseItem<MathOf<T>>{batch, static_cast<MathOf<T>*>(space.inverse)});
  }
  if (view.runs.count > kPiece) {
    device.forEach(pieces(view.runs.count) * view.table.quadsOfRow(), PartialItem<T>{view});
  }
  const std::int64_t items = view.runs.count * view.table.chunks;
  device.forEachGroup(items, lanesFor(view.table.quadsOfChunk()), ChunkItem<T>{view});
  if (view.utility.sketched()) {
    device.forEach(items, CellItem{view.runs, view.table, view.utility, space.cells, space.items});
    device.sort(space.cells, space.sorted_cells, space.items, space.item_order, items,
                keyBits(static_cast<std::int64_t>(view.utility.cell_count)), space.sort, space.sort_bytes);
    device.forEach(items, SketchItem{view.runs, view.table.chunks, view.utility, space.sorted_cells, space.item_order,
                                     view.grown});
  }
}

// After runGrouping.
template <class T, class Device>
void runRenorm(Device& device, const RenormView<T>& view) {
  device.forEachGroup(view.runs.count, lanesFor(view.table.quadsOfRow()), RenormItem<T>{view});
}

// core::ChunkUtility::renormalise of `count` chunks; returns what the factor is afterwards.
template <class Device>
double runRenormalise(Device& device, const UtilityView& utility, std::int64_t count, double factor) {
  if (utility.floats != nullptr) {
    device.forEach(count, RenormaliseFloat{utility.floats, static_cast<float>(1 / factor)});
    return 1;
  }
  const int octaves = std::ilogb(factor);
  device.forEach(count, RenormaliseCode{utility.codes, octaves * core::UtilityCode::kCodesAnOctave});
  return std::ldexp(factor, -octaves);
}

}  // namespace torchext::cuda
