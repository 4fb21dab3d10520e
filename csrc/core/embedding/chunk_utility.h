// ChunkUtility counts how useful each chunk has been (FIITED, section 3.2): u <- gamma u + a g in every step. Here a
// are the row's accesses in the step, and g is the L2 norm of the chunk's gradient. Absent chunks collect, too.
//
// Instead of a sweep that multiplies all of them by gamma, what is added grows: a g gamma^-n in step n. Comparisons
// between chunks do not change, and true utility = stored / gamma^-n. Before the factor overflows, renormalise()
// divides everything stored by it (floats at 2^60; bytes at 2^12, whose range is smaller).
//
// Three layouts, views of memory that the caller owns:
//   floats  one float a chunk of the table
//   bytes   one byte a chunk of the table: 0 is zero, code c is 2^((c - 96) / 4), so 2^-23.75 .. 2^39.75 in steps of
//           19 %: room for the factor, and for gradients that a scaler of the loss has multiplied by 2^16. What is
//           above is cut off, and chunks that are cut off look alike; what is below counts at random. Adding rounds at
//           random between two codes, which keeps the mean exact where a step is smaller than the gap between codes;
//           the randomness is a hash of key and step: the same on all ranks and threads
//   sketch  one byte a slot for resident chunks; absent ones share `cells` cells of (key, byte). A cell belongs to one
//           key; another key that falls on it wears its utility down by what it would have added and takes the cell
//           over when nothing is left (Misra and Gries' majority vote, a cell each). Keys are compared: a chunk that
//           was never used never looks useful
//
// Threads: add() for different keys at once, but one thread in the sketch layout.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "core/embedding/chunk_index.h"

namespace torchext::core {

// The byte form: codes of non-negative numbers on a log scale.
class UtilityCode {
 public:
  static float decode(std::uint8_t code);
  // The code below or above `value`, the nearer the likelier; `random` are 32 uniform bits.
  static std::uint8_t encode(float value, std::uint32_t random);
  // Codes by which dividing by 2^n moves a code.
  static constexpr int kCodesAnOctave = 4;
  static constexpr int kCodeOfOne = 96;
};

// The cell that a key falls on.
constexpr std::size_t sketchCell(std::int64_t key, std::size_t cells) {
  return scaleBits(mixBits(~static_cast<std::uint64_t>(key)), cells);
}

class ChunkUtility {
 public:
  enum class Layout { kNone, kFloats, kBytes, kSketch };

  // Keeps nothing: for tables whose chunks are all resident.
  static ChunkUtility none() { return ChunkUtility(Layout::kNone); }
  static ChunkUtility floats(std::span<float> values);
  static ChunkUtility bytes(std::span<std::uint8_t> codes);
  // codes: the slots' bytes, then the cells'; keys: the cells' keys, -1 where free. std::invalid_argument unless there
  // are at least as many codes as keys, and a key.
  static ChunkUtility sketch(std::span<std::uint8_t> codes, std::span<std::int32_t> keys);

  Layout layout() const { return layout_; }

  // Adds amount (a g gamma^-n, finite and not negative; anything else adds nothing) to a chunk; slot as the index has
  // it. step: any number that differs from step to step.
  void add(std::int64_t key, std::int32_t slot, float amount, std::uint64_t step);

  // The same for the chunks first_key, first_key + 1, ... of a row. Not in the sketch layout, which needs their slots.
  void addRow(std::int64_t first_key, std::span<const float> amounts, std::uint64_t step) {
    if (layout_ == Layout::kFloats) {
      float* const values = values_.data() + first_key;
      for (std::size_t c = 0; c < amounts.size(); ++c) {
        values[c] += addable(amounts[c]) ? amounts[c] : 0.0F;
      }
      return;
    }
    for (std::size_t c = 0; c < amounts.size(); ++c) {
      add(first_key + static_cast<std::int64_t>(c), ChunkIndex::kAbsent, amounts[c], step);
    }
  }

  // Brings what addRow() of a row's first key touches into the cache's second level; always inlined as
  // ChunkIndex::prefetch.
  [[gnu::always_inline]] void prefetch(std::int64_t key) const {
    if (layout_ == Layout::kFloats) {
      __builtin_prefetch(values_.data() + key, 0, 2);
    } else if (layout_ == Layout::kBytes) {
      __builtin_prefetch(codes_.data() + key, 0, 2);
    }
  }

  // The stored utility. In the sketch layout 0 for absent chunks without a cell.
  float get(std::int64_t key, std::int32_t slot) const {
    return layout_ == Layout::kFloats ? values_[static_cast<std::size_t>(key)] : getCoded(key, slot);
  }

  // The memory of the floats layout: the stored utility of every key.
  std::span<const float> floatValues() const { return values_; }

  // Whether the factor must be brought back to 1 before it is used.
  bool mustRenormalise(double factor) const { return factor > (layout_ == Layout::kFloats ? 0x1.0p60 : 0x1.0p12); }
  // Divides everything by the factor; bytes by the power of two below it. Returns what the factor is afterwards.
  double renormalise(double factor);

  // Sketch layout: calls visit(key, utility) for every cell in use, in the order of the memory.
  template <class Visit>
  void forEachCell(Visit&& visit) const {
    for (std::size_t cell = 0; cell < keys_.size(); ++cell) {
      if (keys_[cell] >= 0) {
        visit(static_cast<std::int64_t>(keys_[cell]), UtilityCode::decode(codes_[slots() + cell]));
      }
    }
  }

  // What pruning tells the sketch layout; the others need nothing. First forget(key) for every chunk that will be
  // admitted, so that its cell is free; then dropped(), moved() and admitted() in the order of the plan.
  void forget(std::int64_t key);
  // The chunk leaves its slot; it gets a cell unless the one it falls on holds more.
  void dropped(std::int64_t key, std::int32_t slot);
  void moved(std::int32_t from, std::int32_t to);
  void admitted(std::int32_t slot, float utility);

 private:
  explicit ChunkUtility(Layout layout) : layout_(layout) {}
  static bool addable(float amount) { return amount > 0 && amount <= std::numeric_limits<float>::max(); }
  float getCoded(std::int64_t key, std::int32_t slot) const;
  std::size_t slots() const { return codes_.size() - keys_.size(); }
  std::size_t cellOf(std::int64_t key) const { return sketchCell(key, keys_.size()); }

  Layout layout_;
  std::span<float> values_;
  std::span<std::uint8_t> codes_;
  std::span<std::int32_t> keys_;
};

}  // namespace torchext::core
