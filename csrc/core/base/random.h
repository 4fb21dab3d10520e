// Random numbers that are the same on every compiler, standard library and platform.
//
// std::mt19937 is portable, but std::uniform_int_distribution and std::shuffle are not: two hosts with different
// standard libraries would draw different groups from one seed. Schedules that workers compute by themselves need one
// answer.
//
// xoshiro256** 1.0 (Blackman and Vigna, public domain), seeded by splitmix64 as its authors advise. Not for
// cryptography.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/base/mix_bits.h"

namespace torchext::core {

class Random {
 public:
  explicit Random(std::uint64_t seed) {
    for (auto& word : state_) {
      word = mixBits(seed);
      seed += 0x9E3779B97F4A7C15ULL;
    }
  }

  // 64 uniform bits.
  std::uint64_t next() {
    const std::uint64_t result = rotateLeft(state_[1] * 5, 7) * 9;
    const std::uint64_t shifted = state_[1] << 17U;
    state_[2] ^= state_[0];
    state_[3] ^= state_[1];
    state_[1] ^= state_[2];
    state_[0] ^= state_[3];
    state_[2] ^= shifted;
    state_[3] = rotateLeft(state_[3], 45);
    return result;
  }

  // Uniform in 0..bound-1 without bias (Lemire's multiplication with rejection); bound is 1 or more.
  std::uint32_t below(std::uint32_t bound) {
    std::uint64_t product = (next() >> 32U) * bound;
    auto low = static_cast<std::uint32_t>(product);
    if (low < bound) {
      const std::uint32_t threshold = (0U - bound) % bound;
      while (low < threshold) {
        product = (next() >> 32U) * bound;
        low = static_cast<std::uint32_t>(product);
      }
    }
    return static_cast<std::uint32_t>(product >> 32U);
  }

  // Uniform in [0, 1) with 53 bits.
  double uniform() { return static_cast<double>(next() >> 11U) * 0x1.0p-53; }

  // Fisher-Yates over the first `count` places only: items[0..count) become a uniform sample, in random order.
  template <typename T>
  void sample(std::vector<T>& items, std::size_t count) {
    for (std::size_t i = 0; i < count && i + 1 < items.size(); ++i) {
      const std::size_t j = i + below(static_cast<std::uint32_t>(items.size() - i));
      std::swap(items[i], items[j]);
    }
  }

  template <typename T>
  void shuffle(std::vector<T>& items) {
    sample(items, items.size());
  }

 private:
  static std::uint64_t rotateLeft(std::uint64_t x, unsigned k) { return (x << k) | (x >> (64U - k)); }

  std::array<std::uint64_t, 4> state_{};
};

}  // namespace torchext::core
