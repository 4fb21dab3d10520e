// The utility of chunks on the device: core::ChunkUtility's layouts, a chunk at a time.
//
// The byte form there reads a table of powers; here the same numbers are put together from the bits of a float, because
// a table in memory would cost more than the few operations. Both give the same codes, which a test compares.
//
// Each chunk, and each cell of a sketch (bag_sketch.h), is added to by one thread of a step, so nothing is atomic.
// Neighbouring bytes belong to other threads; the device writes bytes singly.
#pragma once

#include <bit>
#include <cstdint>

#include "csrc/core/embedding/chunk_index.h"
#include "csrc/core/embedding/chunk_utility.h"
#include "kernels/cuda/lanes.h"

namespace torchext::cuda {

inline constexpr float kLargestFloat = 3.402823466e+38F;

// core::UtilityCode::decode
TORCHEXT_HD float decodeUtility(std::uint8_t code) {
  if (code == 0) {
    return 0;
  }
  // 2^(steps / 4): the whole part is the exponent of a float, the rest one of four mantissas (chunk_utility.cpp).
  const auto steps = static_cast<std::uint32_t>(code + 4 * 127 - core::UtilityCode::kCodeOfOne);
  const std::uint32_t rest = steps % 4;
  const float mantissa = rest == 0 ? 1.0F : rest == 1 ? 1.1892071F : rest == 2 ? 1.4142135F : 1.6817929F;
  return std::bit_cast<float>((steps / 4) << 23U | (std::bit_cast<std::uint32_t>(mantissa) & 0x7FFFFFU));
}

// core::UtilityCode::encode
TORCHEXT_HD std::uint8_t encodeUtility(float value, std::uint32_t random) {
  if (!(value > 0)) {
    return 0;
  }
  if (value >= decodeUtility(255)) {
    return 255;
  }
  int below = 0;
  if (value >= decodeUtility(1)) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const auto mantissa = std::bit_cast<float>((bits & 0x7FFFFFU) | 0x3F800000U);
    const int quarter = mantissa >= 1.6817929F ? 3 : mantissa >= 1.4142135F ? 2 : mantissa >= 1.1892071F ? 1 : 0;
    below = core::UtilityCode::kCodeOfOne + 4 * (static_cast<int>(bits >> 23U) - 127) + quarter;
  }
  const float low = decodeUtility(static_cast<std::uint8_t>(below));
  const float share = (value - low) / (decodeUtility(static_cast<std::uint8_t>(below + 1)) - low);
  const bool up = static_cast<float>(random >> 8U) * 0x1.0p-24F < share;
  return static_cast<std::uint8_t>(below + (up ? 1 : 0));
}

struct UtilityView {
  float* floats = nullptr;            // one a chunk of the table; at most one of the two, neither: nothing is kept
  std::uint8_t* codes = nullptr;      // the same; of a sketch one a slot, then one a cell
  std::int32_t* cell_keys = nullptr;  // of a sketch; -1 where a cell is free
  std::size_t cell_count = 0;
  std::int64_t slots = 0;  // of a sketch
  float factor = 1;        // gamma^-n
  std::uint64_t step = 0;

  TORCHEXT_HD bool kept() const { return floats != nullptr || codes != nullptr; }
  // Then what absent chunks grow by is left for SketchItem.
  TORCHEXT_HD bool sketched() const { return cell_keys != nullptr; }
  TORCHEXT_HD std::size_t cellOf(std::int64_t key) const { return core::sketchCell(key, cell_count); }

  // core::ChunkUtility::add, but of an absent chunk in a sketch; grown: with the factor.
  TORCHEXT_HD void add(std::int64_t key, std::int32_t slot, float grown) const {
    if (!addable(grown)) {
      return;
    }
    if (floats != nullptr) {
      floats[key] += grown;
      return;
    }
    std::uint8_t& code = codes[sketched() ? std::int64_t{slot} : key];
    code = encodeUtility(decodeUtility(code) + grown, randomBits(key));
  }

  // The same of an absent chunk that falls on `cell`.
  TORCHEXT_HD void addToCell(std::size_t cell, std::int64_t key, float grown) const {
    if (!addable(grown)) {
      return;
    }
    std::uint8_t& code = codes[slots + static_cast<std::int64_t>(cell)];
    float held = decodeUtility(code);
    if (cell_keys[cell] != key) {
      const float left = cell_keys[cell] < 0 ? 0.0F : held - grown;
      if (left > 0) {
        code = encodeUtility(left, randomBits(key));
        return;
      }
      cell_keys[cell] = static_cast<std::int32_t>(key);
      held = 0;
      grown = left < 0 ? -left : grown;
    }
    code = encodeUtility(held + grown, randomBits(key));
  }

 private:
  TORCHEXT_HD static bool addable(float grown) { return grown > 0 && grown <= kLargestFloat; }
  TORCHEXT_HD std::uint32_t randomBits(std::int64_t key) const {
    const std::uint64_t bits = core::mixBits(static_cast<std::uint64_t>(key) ^ (step * 0xD1342543DE82EF95ULL));
    return static_cast<std::uint32_t>(bits >> 32U);
  }
};

// core::ChunkUtility::renormalise, element by element: floats by a factor, bytes by whole octaves.
struct RenormaliseFloat {
  float* values;
  float inverse;
  TORCHEXT_HD void operator()(std::int64_t i) const { values[i] *= inverse; }
};

struct RenormaliseCode {
  std::uint8_t* codes;
  int steps;
  TORCHEXT_HD void operator()(std::int64_t i) const {
    codes[i] = codes[i] > steps ? static_cast<std::uint8_t>(codes[i] - steps) : std::uint8_t{0};
  }
};

}  // namespace torchext::cuda
