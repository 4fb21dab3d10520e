#include "core/embedding/chunk_utility.h"

#include <algorithm>

#include "core/base/check.h"

namespace torchext::core {
namespace {

// 2^(1/4), 2^(1/2), 2^(3/4): written out, because a library's exp2 may differ by a bit from one host to the next.
constexpr std::array<float, 5> kQuarters{1.0F, 1.1892071F, 1.4142135F, 1.6817929F, 2.0F};

std::array<float, 256> makeTable() {
  std::array<float, 256> table{};
  for (int code = 1; code < 256; ++code) {
    const int steps = code - UtilityCode::kCodeOfOne + 4096;  // not negative, so that / and % round down
    table[index(code)] = std::ldexp(kQuarters[index(steps % 4)], steps / 4 - 1024);
  }
  return table;
}

const std::array<float, 256> kTable = makeTable();

std::uint32_t randomBits(std::int64_t key, std::uint64_t step) {
  return static_cast<std::uint32_t>(mixBits(static_cast<std::uint64_t>(key) ^ (step * 0xD1342543DE82EF95ULL)) >> 32U);
}

}  // namespace

float UtilityCode::decode(std::uint8_t code) { return kTable[code]; }

std::uint8_t UtilityCode::encode(float value, std::uint32_t random) {
  if (!(value > 0)) {
    return 0;
  }
  if (value >= kTable[255]) {
    return 255;
  }
  int below = 0;
  if (value >= kTable[1]) {
    int exponent = 0;
    const float mantissa = 2 * std::frexp(value, &exponent);  // 1..2
    int quarter = 3;
    while (quarter > 0 && mantissa < kQuarters[index(quarter)]) {
      --quarter;
    }
    below = kCodeOfOne + kCodesAnOctave * (exponent - 1) + quarter;
  }
  const float low = kTable[index(below)];
  const float share = (value - low) / (kTable[index(below + 1)] - low);
  const bool up = static_cast<float>(random >> 8U) * 0x1.0p-24F < share;
  return static_cast<std::uint8_t>(below + (up ? 1 : 0));
}

ChunkUtility ChunkUtility::floats(std::span<float> values) {
  ChunkUtility utility(Layout::kFloats);
  utility.values_ = values;
  return utility;
}

ChunkUtility ChunkUtility::bytes(std::span<std::uint8_t> codes) {
  ChunkUtility utility(Layout::kBytes);
  utility.codes_ = codes;
  return utility;
}

ChunkUtility ChunkUtility::sketch(std::span<std::uint8_t> codes, std::span<std::int32_t> keys) {
  if (keys.empty() || codes.size() < keys.size()) {
    throwInvalid("cells of the sketch", keys.size(), concat("1..", codes.size(), ", the number of its bytes"));
  }
  ChunkUtility utility(Layout::kSketch);
  utility.codes_ = codes;
  utility.keys_ = keys;
  return utility;
}

void ChunkUtility::add(std::int64_t key, std::int32_t slot, float amount, std::uint64_t step) {
  if (!addable(amount) || layout_ == Layout::kNone) {
    return;
  }
  if (layout_ == Layout::kFloats) {
    values_[static_cast<std::size_t>(key)] += amount;
    return;
  }
  std::uint8_t* code = nullptr;
  if (layout_ == Layout::kBytes) {
    code = &codes_[static_cast<std::size_t>(key)];
  } else if (slot != ChunkIndex::kAbsent) {
    code = &codes_[index(slot)];
  } else {
    const std::size_t cell = cellOf(key);
    code = &codes_[slots() + cell];
    if (keys_[cell] != key) {
      const float left = keys_[cell] < 0 ? 0.0F : UtilityCode::decode(*code) - amount;
      if (left > 0) {
        *code = UtilityCode::encode(left, randomBits(key, step));
        return;
      }
      keys_[cell] = static_cast<std::int32_t>(key);
      *code = 0;
      amount = left < 0 ? -left : amount;
    }
  }
  *code = UtilityCode::encode(UtilityCode::decode(*code) + amount, randomBits(key, step));
}

float ChunkUtility::getCoded(std::int64_t key, std::int32_t slot) const {
  if (layout_ == Layout::kNone) {
    return 0;
  }
  if (layout_ == Layout::kBytes) {
    return UtilityCode::decode(codes_[static_cast<std::size_t>(key)]);
  }
  if (slot != ChunkIndex::kAbsent) {
    return UtilityCode::decode(codes_[index(slot)]);
  }
  const std::size_t cell = cellOf(key);
  return keys_[cell] == key ? UtilityCode::decode(codes_[slots() + cell]) : 0;
}

double ChunkUtility::renormalise(double factor) {
  if (layout_ == Layout::kNone) {
    return 1;
  }
  if (layout_ == Layout::kFloats) {
    const auto inverse = static_cast<float>(1 / factor);
    for (float& value : values_) {
      value *= inverse;
    }
    return 1;
  }
  const int octaves = std::ilogb(factor);
  for (std::uint8_t& code : codes_) {
    code = static_cast<std::uint8_t>(std::max(0, code - octaves * UtilityCode::kCodesAnOctave));
  }
  return std::ldexp(factor, -octaves);
}

void ChunkUtility::forget(std::int64_t key) {
  if (layout_ != Layout::kSketch) {
    return;
  }
  const std::size_t cell = cellOf(key);
  if (keys_[cell] == key) {
    keys_[cell] = -1;
    codes_[slots() + cell] = 0;
  }
}

void ChunkUtility::moved(std::int32_t from, std::int32_t to) {
  if (layout_ == Layout::kSketch) {
    codes_[index(to)] = codes_[index(from)];
    codes_[index(from)] = 0;
  }
}

void ChunkUtility::admitted(std::int32_t slot, float utility) {
  if (layout_ == Layout::kSketch) {
    codes_[index(slot)] = UtilityCode::encode(utility, 0xFFFFFFFFU);
  }
}

void ChunkUtility::dropped(std::int64_t key, std::int32_t slot) {
  if (layout_ != Layout::kSketch) {
    return;
  }
  const std::size_t cell = cellOf(key);
  std::uint8_t& code = codes_[slots() + cell];
  if (keys_[cell] < 0 || code < codes_[index(slot)]) {
    keys_[cell] = static_cast<std::int32_t>(key);
    code = codes_[index(slot)];
  }
  codes_[index(slot)] = 0;
}

}  // namespace torchext::core
