// ChunkIndex says where a chunk of an embedding table lies: (row, chunk) -> slot of the pool (FIITED's VHPI storage,
// Luo et al., arXiv 2401.04408, section 3.3: virtually hashed, physically indexed).
//
// A table of rows x chunks is stored as a pool of slots, one chunk each; absent chunks have no slot and read as zero.
// A chunk is named by its key = row * chunks + chunk. Three layouts, all views of memory that the caller owns:
//   identity  no memory: every chunk is resident, slot = key
//   direct    one std::int32_t a chunk, its slot or kAbsent: one load a row, 4 bytes a chunk of the *table*
//   hashed    one std::int64_t a cell, (key << 32 | slot) or kEmpty; about 1.43 cells a *slot* (load 0.7), 11.4 bytes a
//             resident chunk and nothing for absent ones. Keys are stored and compared, so rows never collide silently
// The hash is linear probing from a place that depends on the row alone: one walk finds all chunks of a row. Erasing
// moves later cells up instead of leaving marks, so the walk stays short however often chunks come and go.
//
// Threads: const members from any number at once; insert and erase by one, with no other member running.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/base/mix_bits.h"

namespace torchext::core {

// constexpr lets device code call it. Maps mixed bits onto 0..count-1, count < 2^32.
constexpr std::size_t scaleBits(std::uint64_t bits, std::size_t count) { return ((bits >> 32U) * count) >> 32U; }

class ChunkIndex {
 public:
  static constexpr std::int32_t kAbsent = -1;
  static constexpr std::int64_t kEmpty = -1;
  // A row has at most this many chunks, a table at most kMaxKeys: a key fits 31 bits.
  static constexpr int kMaxChunks = 256;
  static constexpr std::int64_t kMaxKeys = (std::int64_t{1} << 31) - 1;

  enum class Layout { kIdentity, kDirect, kHashed };

  // Each throws std::invalid_argument unless rows >= 0, 1 <= chunks <= kMaxChunks and rows * chunks <= kMaxKeys; direct
  // also unless cells.size() = rows * chunks, hashed unless there is at least one cell and fewer than 2^32. The memory
  // is used as it is: fill it with kAbsent or kEmpty for an empty index.
  static ChunkIndex identity(std::int64_t rows, int chunks);
  static ChunkIndex direct(std::span<std::int32_t> cells, std::int64_t rows, int chunks);
  static ChunkIndex hashed(std::span<std::int64_t> cells, std::int64_t rows, int chunks);

  // Cells that a hash for `slots` resident chunks needs: load 0.7, and one cell that stays empty.
  static std::size_t cellsFor(std::size_t slots) { return slots + slots * 3 / 7 + 8; }

  std::int64_t rows() const { return rows_; }
  int chunks() const { return chunks_; }
  std::int64_t keys() const { return rows_ * chunks_; }
  Layout layout() const { return layout_; }

  // The slot of one chunk, or kAbsent.
  std::int32_t find(std::int64_t key) const {
    if (layout_ == Layout::kIdentity) {
      return static_cast<std::int32_t>(key);
    }
    if (layout_ == Layout::kDirect) {
      return direct_[key];
    }
    for (std::size_t at = home(key / chunks_); hashed_[at] != kEmpty; at = after(at)) {
      if (keyOf(hashed_[at]) == key) {
        return slotOf(hashed_[at]);
      }
    }
    return kAbsent;
  }

  // The slots of all chunks of a row into slots[0..chunks). Returns how many are resident.
  int findRow(std::int64_t row, std::int32_t* slots) const {
    const std::int64_t first = row * chunks_;
    int resident = 0;
    if (layout_ == Layout::kHashed) {
      for (int c = 0; c < chunks_; ++c) {
        slots[c] = kAbsent;
      }
      for (std::size_t at = home(row); hashed_[at] != kEmpty && resident < chunks_; at = after(at)) {
        const std::int64_t chunk = keyOf(hashed_[at]) - first;
        if (chunk >= 0 && chunk < chunks_) {
          slots[chunk] = slotOf(hashed_[at]);
          ++resident;
        }
      }
      return resident;
    }
    for (int c = 0; c < chunks_; ++c) {
      slots[c] = layout_ == Layout::kDirect ? direct_[first + c] : static_cast<std::int32_t>(first + c);
      resident += slots[c] != kAbsent ? 1 : 0;
    }
    return resident;
  }

  // Brings what findRow(row) reads into the cache's second level, where more can be on its way. Always inlined: GCC
  // takes a function that only prefetches for one without effect, and drops calls of it.
  [[gnu::always_inline]] void prefetch(std::int64_t row) const {
    if (layout_ == Layout::kDirect) {
      __builtin_prefetch(direct_ + row * chunks_, 0, 2);
    } else if (layout_ == Layout::kHashed) {
      __builtin_prefetch(hashed_ + home(row), 0, 2);
    }
  }

  // std::logic_error in the identity layout, when the key is resident already, or when the hash is full.
  void insert(std::int64_t key, std::int32_t slot);
  // Returns the slot it had; std::logic_error unless it is resident (always in the identity layout).
  std::int32_t erase(std::int64_t key);

  // The memory of the direct layout: the slot of every key, or kAbsent.
  std::span<const std::int32_t> directCells() const { return {direct_, layout_ == Layout::kDirect ? cells_ : 0}; }

  struct Residents {
    std::int64_t all = 0;
    std::int64_t beyond = 0;  // those that were not marked
  };
  // Sets used[slot] to 1 for every resident chunk whose slot is below used.size(), and counts.
  Residents markSlots(std::span<std::uint8_t> used) const;

  // Calls visit(key, slot) for every resident chunk, in the order of the memory.
  template <class Visit>
  void forEach(Visit&& visit) const {
    if (layout_ == Layout::kHashed) {
      for (std::size_t at = 0; at < cells_; ++at) {
        if (hashed_[at] != kEmpty) {
          visit(keyOf(hashed_[at]), slotOf(hashed_[at]));
        }
      }
      return;
    }
    for (std::int64_t key = 0; key < keys(); ++key) {
      const std::int32_t slot = layout_ == Layout::kDirect ? direct_[key] : static_cast<std::int32_t>(key);
      if (slot != kAbsent) {
        visit(key, slot);
      }
    }
  }

 private:
  ChunkIndex(Layout layout, std::int64_t rows, int chunks);

  static std::int64_t keyOf(std::int64_t cell) { return cell >> 32; }
  static std::int32_t slotOf(std::int64_t cell) { return static_cast<std::int32_t>(cell & 0x7FFFFFFF); }
  std::size_t home(std::int64_t row) const { return scaleBits(mixBits(static_cast<std::uint64_t>(row)), cells_); }
  std::size_t after(std::size_t at) const { return at + 1 == cells_ ? 0 : at + 1; }

  Layout layout_;
  std::int64_t rows_;
  int chunks_;
  std::int32_t* direct_ = nullptr;
  std::int64_t* hashed_ = nullptr;
  std::size_t cells_ = 0;
};

}  // namespace torchext::core
