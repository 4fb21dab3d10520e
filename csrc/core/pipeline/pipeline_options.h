// PipelineOptions is what a user allows a pipeline to be.
#pragma once

#include <optional>
#include <vector>

#include "core/pipeline/pipeline_table.h"

namespace torchext::core {

struct PipelineOptions {
  int world_size = 1;
  // Of one step, over all replicas of the pipeline: a plan of data width d runs microbatches / d in each.
  int microbatches = 1;
  std::optional<double> memory_bytes = std::nullopt;  // of one rank; none: no limit
  std::vector<OrderFamily> schedules = {OrderFamily::k1F1B};
  std::optional<int> stages = std::nullopt;  // none: every divisor of the world
  double state_factor = 4;                   // StageRules, as are the overhead and the first input gradient
  bool recompute = false;                    // stages that memory limits may; not with a zero bubble
  double overhead_seconds = 0;
  bool first_input_gradient = false;
  // Torch's W adds to gradients past DistributedDataParallel, which then averages nothing: zero bubbles have data width
  // 1, unless who runs the plan averages by other means.
  bool split_data_parallel = false;
  std::vector<int> most_in_flight = {};  // [stage] beside what memory allows; none: no limit. Needs `stages`.
  int frontier_points = 12;              // at most; 0: no frontier
  // All partitions of a number of stages are tried where they are so many or fewer: the plan is the optimum then.
  double most_partitions = 20000;
};

// std::invalid_argument naming the first bad value.
void checkOptions(const PipelineOptions& options);

}  // namespace torchext::core
