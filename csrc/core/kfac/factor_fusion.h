// Which factors travel together: SPD-KFAC's tensor fusion (Shi et al., ICDCS 2021, section V-A).
//
// Factors are positions 0..n-1 in the order in which they are sent. They leave as buckets, one collective each, one
// after the other. Pure; every rank must pass the same times. Seconds and bytes.
#pragma once

#include <cstddef>
#include <vector>

#include "core/transport/alpha_beta.h"

namespace torchext::core {

struct FusionTask {
  std::size_t bytes = 0;
  double ready = 0;  // seconds from the start of the pass; a value below an earlier one counts as that
  int root = 0;      // only neighbours with the same root fuse; -1: an all-reduce, which has none
};

// Ends of the buckets (one past the last factor each), ascending. A factor joins the one before it if it is ready
// before the transfer of the bucket so far would end, and either that bucket could not start before it anyway (the link
// is busy), or waiting for it costs less than the alpha that is saved. O(n).
std::vector<int> fuseFactors(const std::vector<FusionTask>& tasks, const AlphaBeta& cost);

}  // namespace torchext::core
