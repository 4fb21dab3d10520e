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
#include "kernels/cuda/bag_utility.h"

namespace torchext::cuda {

// The memory that a backward pass needs besides its arguments.
struct Workspace {
  std::uint32_t* keys = nullptr;  // these five: one a position
  std::uint32_t* sorted = nullptr;
  std::int32_t* positions = nullptr;
  std::int32_t* order = nullptr;
  std::int32_t* bag_of = nullptr;
  void* inverse = nullptr;  // numbers to compute with, one a bag
  void* partial = nullptr;  // the same, pieces x dim
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

// Cuts a workspace from one allocation that starts at `base`, aligned to 256; with null only to learn how many bytes it
// takes. math_bytes: of a number to compute with.
inline Workspace layOut(void* base, std::int64_t positions, std::int64_t bags, std::int64_t dim, std::size_t math_bytes,
                        std::size_t sort_bytes) {
  constexpr std::size_t kAlignment = 256;
  Workspace space;
  const auto take = [&](std::size_t bytes) -> void* {
    const std::size_t begin = space.bytes;
    space.bytes += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return base == nullptr ? nullptr : static_cast<char*>(base) + begin;
  };
  const std::size_t each = static_cast<std::size_t>(positions) * sizeof(std::int32_t);
  space.keys = static_cast<std::uint32_t*>(take(each));
  space.sorted = static_cast<std::uint32_t*>(take(each));
  space.positions = static_cast<std::int32_t*>(take(each));
  space.order = static_cast<std::int32_t*>(take(each));
  space.bag_of = static_cast<std::int32_t*>(take(each));
  space.inverse = take(static_cast<std::size_t>(bags) * math_bytes);
  space.partial = take(static_cast<std::size_t>(pieces(positions) * dim) * math_bytes);
  space.sort = take(sort_bytes);
  space.sort_bytes = sort_bytes;
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

// After runGrouping. Fills inverse (mode mean) and partial, which the view points to.
template <class T, class Device>
void runBackward(Device& device, const BatchView& batch, const BackwardView<T>& view, MathOf<T>* inverse) {
  if (view.mode == cpu::BagMode::kMean) {
    device.forEach(batch.bags, InverseItem<MathOf<T>>{batch, inverse});
  }
  if (view.runs.count > kPiece) {
    device.forEach(pieces(view.runs.count) * view.table.quadsOfRow(), PartialItem<T>{view});
  }
  device.forEachGroup(view.runs.count * view.table.chunks, lanesFor(view.table.quadsOfChunk()), ChunkItem<T>{view});
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
