// What one collective costs: the alpha-beta model (start-up time, and time a byte).
#pragma once

#include <cstddef>

namespace torchext::core {

// Both are finite, 0 or more.
// A ring of n ranks with link latency a and bandwidth B: alpha = (n-1) a, beta = (n-1) / (n B), for each of
// reduce-scatter and all-gather.
struct AlphaBeta {
  double alpha = 0;  // seconds
  double beta = 0;   // seconds a byte
  double seconds(std::size_t bytes) const { return alpha + beta * static_cast<double>(bytes); }
};

}  // namespace torchext::core
