// Slices of a tensor that begin on lines of the cache, so that threads and copies don't share any.
#pragma once

#include <cstddef>
#include <numeric>

namespace torchext::core {

// Elements between two places that both begin a line of 64 bytes.
constexpr std::size_t elementsPerLine(std::size_t element_size) {
  constexpr std::size_t kLineBytes = 64;
  return kLineBytes / std::gcd(kLineBytes, element_size);
}

}  // namespace torchext::core
