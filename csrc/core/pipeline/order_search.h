// OrderSearch finds the best order of one family for given stages, under their limits of memory.
//
// It is what a partition search asks: sizes in, seconds out, with a memory of what it has seen. Fast paths come first:
// the lower bound (leastSeconds) ends most questions without a simulation.
#pragma once

#include <optional>
#include <vector>

#include "core/pipeline/depth_simulator.h"
#include "core/pipeline/pipeline_plan.h"
#include "core/pipeline/stage_costs.h"
#include "core/pipeline/stage_partition.h"
#include "core/pipeline/zero_bubble_scheduler.h"

namespace torchext::core {

// A partition with its order.
struct StageOrder {
  StageSizes sizes;
  std::vector<bool> recompute;
  std::vector<int> depths;  // most in flight; of 1f1b and gpipe these are the table
  std::vector<int> limits;  // of the list scheduler; none: torch's own zero bubble, or another family
  double seconds = 0;
  double ranked_seconds = 0;  // what orders are compared by: seconds, longer for tight zero bubbles
  double peak_bytes = 0;      // the largest of a stage
};

class OrderSearch {
 public:
  // costs outlives it. microbatches: of one replica.
  OrderSearch(const StageCosts& costs, const PipelineOptions& options, OrderFamily family, int microbatches);

  // None: memory is too small, or no order is faster than `below`. thorough: all seeds, not only the last answer.
  std::optional<StageOrder> best(const StageSizes& sizes, double memory_bytes, double below, bool thorough);
  PipelineTable table(const StageOrder& order);

 private:
  std::optional<StageOrder> bestWith(const StageSizes& sizes, const std::vector<bool>& recompute, double memory_bytes,
                                     double below, bool thorough);

  const StageCosts& costs_;
  const PipelineOptions& options_;
  OrderFamily family_;
  int microbatches_;
  DepthSimulator depths_;
  ZeroBubbleScheduler scheduler_;
  std::vector<int> last_depths_;
};

}  // namespace torchext::core
