// DepthSimulator answers how long a table of depths takes, in mode "ideal", without writing the table.
//
// The searches ask it a hundred thousand times. In round m each stage first runs its forwards up to m + d_j - 1, the
// first stage first, and then B of micro-batch m, the last stage first: an order in which everything is known when it
// is needed. O(p M), nothing allocated; equal to simulateTable to the last bit. Not for several threads.
#pragma once

#include <cstddef>
#include <vector>

#include "core/pipeline/pipeline_profile.h"

namespace torchext::core {

class DepthSimulator {
 public:
  explicit DepthSimulator(int microbatches) : microbatches_(microbatches) {}

  // Depths as of checkDepths, which is not called.
  double seconds(const std::vector<StageTimes>& stages, const std::vector<int>& depths);
  int microbatches() const { return microbatches_; }

 private:
  struct Row {
    std::size_t forwards = 0;  // done
    double free = 0;           // the rank
    double sent_forward = 0;   // the link to the next stage
    double sent_backward = 0;  // the link to the stage before
    double gradient = 0;       // when the current micro-batch's has arrived
  };
  int microbatches_;
  std::vector<Row> rows_;
  std::vector<double> arrived_;  // [stage][micro-batch] the input
};

// No order of whole backwards is faster, split: nor any with I and W. Of every stage j: what comes before its first
// forward, M times its own work and, if not split, what comes after its last backward.
double leastSeconds(const std::vector<StageTimes>& stages, int microbatches, bool split);

}  // namespace torchext::core
