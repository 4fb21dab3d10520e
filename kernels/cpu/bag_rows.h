// RowChunks says where the rows of a batch lie in the pool, and asks for them before they are needed.
//
// Rows lie anywhere in a pool that is far larger than the caches, so a pass waits for memory unless many requests are
// under way at once. The index is asked for 2 kAhead rows ahead, the pool kAhead rows ahead of where the sums are.
//
// The order of use: construct, then for p = begin, begin + 1, ...: at(p), advance(p).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "csrc/core/embedding/chunk_index.h"
#include "kernels/buffer.h"
#include "kernels/cpu/isa.h"

namespace torchext::cpu {

struct ResidentChunk {
  std::int32_t chunk;  // of the row
  std::int32_t slot;   // of the pool
};

// row_of(p) is the row at position p; prefetch(slot) asks for that slot of the pool and whatever goes with it. Both
// must be TORCHEXT_ALWAYS_INLINE (see prefetchRange).
template <class RowOf, class Prefetch>
class RowChunks {
 public:
  static constexpr std::size_t kAhead = 32;

  TORCHEXT_ALWAYS_INLINE RowChunks(const core::ChunkIndex& index, std::size_t begin, std::size_t end,
                                   const RowOf& row_of, const Prefetch& prefetch)
      : index_(index),
        row_of_(row_of),
        prefetch_(prefetch),
        end_(end),
        chunks_(static_cast<std::size_t>(index.chunks())),
        slots_(chunks_),
        counts_(kAhead),
        found_(kAhead * chunks_) {
    for (std::size_t p = begin; p < std::min(end, begin + 2 * kAhead); ++p) {
      index_.prefetch(row_of_(p));
    }
    for (std::size_t p = begin; p < std::min(end, begin + kAhead); ++p) {
      find(p);
    }
  }

  // The resident chunks of position p's row, in their order.
  TORCHEXT_ALWAYS_INLINE std::span<const ResidentChunk> at(std::size_t p) const {
    return {found_.data() + p % kAhead * chunks_, static_cast<std::size_t>(counts_[p % kAhead])};
  }

  // Position p is done; its place goes to p + kAhead.
  TORCHEXT_ALWAYS_INLINE void advance(std::size_t p) {
    if (p + 2 * kAhead < end_) {
      index_.prefetch(row_of_(p + 2 * kAhead));
    }
    if (p + kAhead < end_) {
      find(p + kAhead);
    }
  }

 private:
  // Which chunks of a row are resident no processor can predict, so there is no branch on it: every chunk is written
  // down where the next resident one belongs, and asked for; in place of an absent one slot 0. (In arithmetic, because
  // compilers make branches of conditional expressions.)
  TORCHEXT_ALWAYS_INLINE void find(std::size_t p) {
    ResidentChunk* const found = found_.data() + p % kAhead * chunks_;
    index_.findRow(row_of_(p), slots_.data());
    std::int32_t count = 0;
    for (std::size_t c = 0; c < chunks_; ++c) {
      const std::int32_t slot = slots_[c];
      found[count] = {static_cast<std::int32_t>(c), slot};
      const std::int32_t absent = slot >> 31;  // all ones or none
      count += 1 + absent;
      prefetch_(static_cast<std::size_t>(slot & ~absent));
    }
    counts_[p % kAhead] = count;
  }

  const core::ChunkIndex& index_;
  const RowOf& row_of_;
  const Prefetch& prefetch_;
  std::size_t end_;
  std::size_t chunks_;
  Buffer<std::int32_t> slots_;  // of one row, absent ones too
  Buffer<std::int32_t> counts_;
  Buffer<ResidentChunk> found_;
};

}  // namespace torchext::cpu
