// The utility of absent chunks in the sketch layout (core::ChunkUtility): many keys share a cell, and what a cell holds
// depends on the order in which they come. So that results are those of the CPU, and the same from run to run:
//
//   CellItem      each (sorted position, chunk), an item: the cell of an absent chunk whose row's run begins there,
//   else
//                 the number of cells
//   ChunkItem     leaves there what the chunk's utility grows by (bag_backward.h)
//   a stable sort of the items by their cells: a cell's are one run, rows in rising order
//   SketchItem    each run, a thread: adds them to the cell one after the other
//
// A run is as long as a batch has absent chunks that share a cell, a few unless the sketch is far too small for it.
#pragma once

#include <cstdint>

#include "kernels/cuda/bag_backward.h"
#include "kernels/cuda/bag_utility.h"
#include "kernels/cuda/bag_views.h"

namespace torchext::cuda {

// Items: positions x chunks.
struct CellItem {
  RunsView runs;
  TableView table;
  UtilityView utility;
  std::uint32_t* cells;
  std::int32_t* items;

  TORCHEXT_HD void operator()(std::int64_t item) const {
    const std::int64_t i = item / table.chunks;
    const auto chunk = static_cast<int>(item - i * table.chunks);
    items[item] = static_cast<std::int32_t>(item);
    const bool absent = runs.beginsAt(i) && table.slotOf(runs.keys[i], chunk) == kAbsent;
    cells[item] =
        static_cast<std::uint32_t>(absent ? utility.cellOf(keyOf(runs, table.chunks, item)) : utility.cell_count);
  }

  // The key of the chunk behind an item at which a run begins.
  TORCHEXT_HD static std::int64_t keyOf(const RunsView& runs, int chunks, std::int64_t item) {
    const std::int64_t i = item / chunks;
    return std::int64_t{runs.keys[i]} * chunks + (item - i * chunks);
  }
};

// Items: positions x chunks, sorted by cell.
struct SketchItem {
  RunsView runs;
  int chunks;
  UtilityView utility;
  const std::uint32_t* cells;
  const std::int32_t* items;  // of each cell
  const float* grown;         // of each item before the sort

  TORCHEXT_HD void operator()(std::int64_t begin) const {
    const std::uint32_t cell = cells[begin];
    if (cell >= utility.cell_count || (begin > 0 && cells[begin - 1] == cell)) {
      return;
    }
    for (std::int64_t i = begin; i < runs.count * chunks && cells[i] == cell; ++i) {
      utility.addToCell(cell, CellItem::keyOf(runs, chunks, items[i]), grown[items[i]]);
    }
  }
};

}  // namespace torchext::cuda
