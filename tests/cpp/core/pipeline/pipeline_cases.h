// Stages, layers and random tables that the tests of core/pipeline are tried on.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/base/check.h"
#include "core/base/random.h"
#include "core/pipeline/pipeline_plan.h"

namespace torchext::core::testing {

#ifdef TORCHEXT_SANITIZED
inline constexpr int kPipelineRounds = 60;
#else
inline constexpr int kPipelineRounds = 500;
#endif

using Ints = std::vector<int>;

// Backward twice the forward, half of it for weights; one transfer between all stages.
inline std::vector<StageTimes> stagesOf(const std::vector<double>& forward, double transfer) {
  std::vector<StageTimes> stages;
  for (std::size_t j = 0; j < forward.size(); ++j) {
    StageTimes stage;
    stage.forward_seconds = forward[j];
    stage.backward_input_seconds = forward[j];
    stage.backward_weight_seconds = forward[j];
    stage.backward_seconds = 2 * forward[j];
    stage.transfer_seconds = j + 1 < forward.size() ? transfer : 0;
    stages.push_back(stage);
  }
  return stages;
}

// Whole numbers, so that sums are exact. most_transfer 0: none.
inline std::vector<StageTimes> randomStages(Random& random, int count, unsigned most_transfer = 4) {
  std::vector<StageTimes> stages(index(count));
  for (StageTimes& stage : stages) {
    stage.forward_seconds = 1 + random.below(6);
    stage.backward_input_seconds = 1 + random.below(6);
    stage.backward_weight_seconds = 1 + random.below(6);
    stage.backward_seconds = stage.backward_input_seconds + stage.backward_weight_seconds;
    stage.transfer_seconds = random.below(most_transfer + 1);
  }
  stages.back().transfer_seconds = 0;
  return stages;
}

// One unit kept a layer; backward as of stagesOf.
inline std::vector<PipelineLayer> layersOf(const std::vector<double>& forward, std::size_t kept_bytes = 1) {
  std::vector<PipelineLayer> layers;
  for (const double seconds : forward) {
    layers.push_back({seconds, seconds, seconds, kept_bytes, 0, 0});
  }
  return layers;
}

inline PipelineLink transferOf(double seconds) { return {CostTable::line(seconds, 0), {}}; }

// One rank a stage; stage 0 as the others.
inline PipelineOptions optionsOf(int stages, int microbatches, OrderFamily family = OrderFamily::k1F1B) {
  PipelineOptions options;
  options.world_size = stages;
  options.stages = stages;
  options.microbatches = microbatches;
  options.schedules = {family};
  options.first_input_gradient = true;
  options.frontier_points = 0;
  return options;
}

inline Ints sizesOf(const PlannedPipeline& plan) {
  Ints sizes;
  for (const PlannedStage& stage : plan.stages) {
    sizes.push_back(stage.last - stage.first + 1);
  }
  return sizes;
}

inline Ints depthsOf(const PlannedPipeline& plan) {
  Ints depths;
  for (const PlannedStage& stage : plan.stages) {
    depths.push_back(stage.depth);
  }
  return depths;
}

// "0F0 0F1 0B0 0B1".
inline std::string textOf(const std::vector<PipelineAction>& row) {
  std::string text;
  for (const PipelineAction& action : row) {
    text += (text.empty() ? "" : " ") + toString(action);
  }
  return text;
}

// A table on which ranks can go on: any action whose needs are met comes next, micro-batches in any order.
inline PipelineTable randomTable(Random& random, int stages, int microbatches, bool split) {
  PipelineTable table(index(stages));
  // [stage][micro-batch] 0: new, 1: F done, 2: I done, 3: all done.
  std::vector<Ints> progress(index(stages), Ints(index(microbatches), 0));
  while (true) {
    std::vector<PipelineAction> enabled;
    for (int j = 0; j < stages; ++j) {
      for (int m = 0; m < microbatches; ++m) {
        const int now = progress[index(j)][index(m)];
        if (now == 0 && (j == 0 || progress[index(j - 1)][index(m)] > 0)) {
          enabled.push_back({ActionKind::kForward, j, m});
        } else if (now == 1 && (j + 1 == stages || progress[index(j + 1)][index(m)] > 1)) {
          enabled.push_back({split ? ActionKind::kBackwardInput : ActionKind::kBackward, j, m});
        } else if (now == 2) {
          enabled.push_back({ActionKind::kBackwardWeight, j, m});
        }
      }
    }
    if (enabled.empty()) {
      return table;
    }
    const PipelineAction action = enabled[random.below(static_cast<std::uint32_t>(enabled.size()))];
    int& now = progress[index(action.stage)][index(action.microbatch)];
    now = action.kind == ActionKind::kBackward ? 3 : now + 1;
    table[index(action.stage)].push_back(action);
  }
}

}  // namespace torchext::core::testing
