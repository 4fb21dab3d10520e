// OrderSearch finds the best order of one family for given stages, under their limits of memory.
//
// It is what a partition search asks: sizes in, an order out. The lower bound (leastSeconds) answers most questions
// without a simulation. Memory gives each stage its limit of depth. A stage that memory limits may recompute, where
// that is allowed; with a zero bubble it may not, for what I recomputes lives until W.
#pragma once

#include <optional>
#include <vector>

#include "core/pipeline/depth_search.h"
#include "core/pipeline/pipeline_options.h"
#include "core/pipeline/stage_costs.h"
#include "core/pipeline/stage_partition.h"
#include "core/pipeline/zero_bubble_search.h"

namespace torchext::core {

// A partition with its order.
struct StageOrder {
  StageSizes sizes;
  std::vector<bool> recompute;
  std::vector<int> depths;    // most in flight; of 1f1b and gpipe these are the table
  std::vector<int> limits;    // of the list scheduler; none: torch's own zero bubble, or another family
  double seconds = 0;         // in mode "ideal"; of PortSearch as torch runs it
  double ranked_seconds = 0;  // what orders are compared by
  double peak_bytes = 0;      // the largest of a stage
};

// By time; of equals the lower peak, then less in flight, then the smaller sizes first.
bool isBetter(const StageOrder& order, const StageOrder& other);

class OrderSearch {
 public:
  // Both outlive it. microbatches: of one replica.
  OrderSearch(const StageCosts& costs, const PipelineOptions& options, OrderFamily family, int microbatches);

  // None: memory is too small, or ranked_seconds would be above `below`.
  std::optional<StageOrder> best(const StageSizes& sizes, double memory_bytes, double below);
  // Quicker, and at times no answer where there is one.
  std::optional<StageOrder> near(const StageSizes& sizes, double memory_bytes, double below);

  std::vector<StageTimes> times(const StageSizes& sizes, const std::vector<bool>& recompute) const;
  PipelineTable table(const StageOrder& order);
  double least(const StageSizes& sizes) const;  // leastSeconds
  // [stage] the most in flight that memory and options allow.
  std::vector<int> limits(const StageOrder& order, double memory_bytes) const;
  double peakBytes(const StageOrder& order) const;

 private:
  std::optional<StageOrder> search(const StageSizes& sizes, double memory_bytes, double below, bool thorough);
  std::optional<StageOrder> searchWith(StageOrder order, double memory_bytes, double below, bool thorough);
  bool findDepths(StageOrder& order, const std::vector<StageTimes>& times, const std::vector<int>& limits, double below,
                  bool thorough);
  bool findSplit(StageOrder& order, const std::vector<StageTimes>& times, const std::vector<int>& limits,
                 bool thorough);

  const StageCosts& costs_;
  const PipelineOptions& options_;
  OrderFamily family_;
  int microbatches_;
  DepthSearch depths_;
  ZeroBubbleSearch zero_bubbles_;
};

}  // namespace torchext::core
