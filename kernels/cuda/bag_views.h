// A table and a batch of the adaptive embedding bag as its CUDA kernels see them: plain structs of raw pointers, copied
// into a kernel's arguments.
//
// Where the state of a module on CUDA lives (kernels/adaptive_bag.h names the tensors):
//   on the device    pool, the optimizer's state, index, utility, sketch, seen
//   on the host      clock and lr: two numbers and one that every step reads, so that no step waits for the device
// Who decides: selection stays in csrc/core on the CPU. Pruning, now and then, fetches index and utility, decides as it
// does for a table on the CPU, and writes them back; values move on the device. A table that
// is moved to another device goes on with the same decisions.
//
// A step. Forward: bagForward. Backward: every position gets the row it belongs to as its key (padding and positions
// outside of bags the key `rows`), keys are sorted with their positions, and each row's run of equal keys is summed
// once and handed to the update (bag_backward.h). Nothing is added atomically: results are the same from run to run.
//
// Bad batches: kernels leave out ids that are out of range and clamp offsets, so they never touch memory that is not
// theirs. A separate pass (BatchView::wrong) raises a flag, which the forward operator reads after its kernels have
// been queued; then the check of the CPU names position and value. The backward pass sees the ids of a forward pass.
#pragma once

#include <cstddef>
#include <cstdint>

#include "csrc/core/embedding/chunk_index.h"
#include "kernels/bag_batch.h"
#include "kernels/cuda/float4.h"

namespace torchext::cuda {

inline constexpr std::int32_t kAbsent = core::ChunkIndex::kAbsent;

// Where a row's chunks lie in the pool; reads the memory of a core::ChunkIndex.
struct TableView {
  core::ChunkIndex::Layout layout = core::ChunkIndex::Layout::kIdentity;
  const std::int32_t* direct = nullptr;
  const std::int64_t* hashed = nullptr;
  std::size_t cells = 0;  // of the hash
  std::int64_t rows = 0;
  int chunks = 1;
  int chunk_dim = 1;
  bool aligned =
      false;  // chunk_dim is a multiple of kQuad, and whatever the columns belong to begins at kQuadAlignment

  TORCHEXT_HD int dim() const { return chunks * chunk_dim; }
  TORCHEXT_HD int quadsOfChunk() const { return (chunk_dim + kQuad - 1) / kQuad; }
  TORCHEXT_HD int quadsOfRow() const { return chunks * quadsOfChunk(); }
  // Of a chunk, 0 <= quad < quadsOfChunk().
  TORCHEXT_HD Columns columns(int quad) const {
    const int left = chunk_dim - quad * kQuad;
    return {quad * kQuad, left < kQuad ? left : kQuad, aligned};
  }

  // The slot of a chunk, or kAbsent.
  TORCHEXT_HD std::int32_t slotOf(std::int64_t row, int chunk) const {
    const std::int64_t key = row * chunks + chunk;
    if (layout == core::ChunkIndex::Layout::kIdentity) {
      return static_cast<std::int32_t>(key);
    }
    if (layout == core::ChunkIndex::Layout::kDirect) {
      return direct[key];
    }
    std::size_t at = core::scaleBits(core::mixBits(static_cast<std::uint64_t>(row)), cells);
    for (std::int64_t cell = hashed[at]; cell != core::ChunkIndex::kEmpty; cell = hashed[at]) {
      if (cell >> 32 == key) {
        return static_cast<std::int32_t>(cell & 0x7FFFFFFF);
      }
      at = at + 1 == cells ? 0 : at + 1;
    }
    return kAbsent;
  }
};

// Ids and how they make bags, as they came: unchecked, of either integer type.
struct BatchView {
  const std::int32_t* ids32 = nullptr;  // of each position; one of the two
  const std::int64_t* ids64 = nullptr;
  const std::int32_t* offsets32 = nullptr;  // where each bag begins; neither: bags of bag_size ids
  const std::int64_t* offsets64 = nullptr;
  std::int64_t offset_count = 0;  // bags, or one more: then the last is where the last bag ends
  std::int64_t positions = 0;     // less than 2^31
  std::int64_t bags = 0;
  std::int64_t bag_size = 0;
  std::int64_t rows = 0;
  std::int64_t padding = -1;  // the id that counts as not there; -1: none
  cpu::BagMode mode = cpu::BagMode::kSum;

  TORCHEXT_HD bool hasOffsets() const { return offsets32 != nullptr || offsets64 != nullptr; }
  TORCHEXT_HD std::int64_t id(std::int64_t p) const { return ids32 != nullptr ? ids32[p] : ids64[p]; }
  TORCHEXT_HD std::int64_t offset(std::int64_t i) const { return offsets32 != nullptr ? offsets32[i] : offsets64[i]; }
  TORCHEXT_HD bool inRange(std::int64_t id) const {
    return static_cast<std::uint64_t>(id) < static_cast<std::uint64_t>(rows);  // a negative id is a large unsigned one
  }
  // Whether an id is a row that adds to its bag.
  TORCHEXT_HD bool counts(std::int64_t id) const { return inRange(id) && id != padding; }

  // Bag b is positions begin(b) .. end(b) - 1.
  TORCHEXT_HD std::int64_t begin(std::int64_t bag) const {
    return hasOffsets() ? clamped(offset(bag)) : bag * bag_size;
  }
  TORCHEXT_HD std::int64_t end(std::int64_t bag) const {
    if (!hasOffsets()) {
      return (bag + 1) * bag_size;
    }
    return bag + 1 < offset_count ? clamped(offset(bag + 1)) : positions;
  }

  // The bag of a position; -1 behind the last bag.
  TORCHEXT_HD std::int32_t bagOf(std::int64_t p) const {
    if (bags == 0) {
      return -1;
    }
    if (!hasOffsets()) {
      return static_cast<std::int32_t>(p / bag_size);
    }
    std::int64_t low = 0;  // the last bag that begins at p or before
    std::int64_t high = bags;
    while (low + 1 < high) {
      const std::int64_t middle = low + (high - low) / 2;
      if (begin(middle) <= p) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return begin(low) <= p && p < end(low) ? static_cast<std::int32_t>(low) : -1;
  }

  // Items of the check: positions and offsets side by side.
  TORCHEXT_HD std::int64_t checks() const { return positions > offset_count ? positions : offset_count; }
  // Whether the i-th id or offset is bad; what cpu::BagBatch refuses, for every i below checks().
  TORCHEXT_HD bool wrong(std::int64_t i) const {
    if (i < positions && !inRange(id(i))) {
      return true;
    }
    if (i >= offset_count) {
      return false;
    }
    const std::int64_t before = i == 0 ? 0 : offset(i - 1);
    return offset(i) < before || offset(i) > positions || (i == 0 && bags > 0 && offset(0) != 0);
  }

 private:
  TORCHEXT_HD std::int64_t clamped(std::int64_t offset) const {
    return offset < 0 ? 0 : offset > positions ? positions : offset;
  }
};

}  // namespace torchext::cuda
