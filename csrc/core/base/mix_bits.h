// mixBits() mixes bits well: for places in a hash, for random numbers' seeds, for stamps of what must be alike.
#pragma once

#include <cstdint>

namespace torchext::core {

// The finaliser of splitmix64, of which x is the state. constexpr lets device code call it.
constexpr std::uint64_t mixBits(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 30U)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27U)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31U);
}

}  // namespace torchext::core
