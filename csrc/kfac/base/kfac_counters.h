// KfacCounters counts what K-FAC does on this rank, and sums the seconds that it takes.
//
// Seconds are the host's: on an accelerator a block is over when its work is queued. The engine's lock guards them.
#pragma once

#include <cstdint>

#include "kfac/linalg/factor_inverse.h"

namespace torchext {

struct KfacCounters {
  std::int64_t steps = 0;
  std::int64_t skipped = 0;  // not finite, on all ranks
  std::int64_t factor_updates = 0;
  std::int64_t inverse_updates = 0;
  std::int64_t runs = 0;                    // buckets of factors
  std::int64_t runs_overlapped = 0;         // of those, left before step()
  std::int64_t row_directions = 0;          // of layers, made of the rows of all ranks
  std::int64_t row_directions_refused = 0;  // gradients that were not those of their rows
  std::int64_t row_directions_ahead = 0;    // those that were written, too, before step()
  InverseFailures failures;
  double factor_seconds = 0;
  double exchange_wait_seconds = 0;
  double invert_seconds = 0;
  double distribute_seconds = 0;
  double precondition_seconds = 0;
};

}  // namespace torchext
