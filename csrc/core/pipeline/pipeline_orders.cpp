#include "core/pipeline/pipeline_orders.h"

#include <algorithm>

#include "core/base/check.h"

namespace torchext::core {
namespace {

void checkMicrobatches(int microbatches) {
  if (microbatches < 1) {
    throwInvalid("microbatches", microbatches, "1 or more");
  }
}

void checkStageCount(int stages) {
  if (stages < 1) {
    throwInvalid("stages", stages, "1 or more");
  }
}

}  // namespace

void checkDepths(const std::vector<int>& depths, int microbatches) {
  checkMicrobatches(microbatches);
  checkStageCount(static_cast<int>(depths.size()));
  for (std::size_t j = 0; j < depths.size(); ++j) {
    if (depths[j] < 1 || depths[j] > microbatches) {
      throwInvalid("depth", depths[j], concat("1..", microbatches, ", the micro-batches; it is of stage ", j));
    }
    if (j > 0 && depths[j] > depths[j - 1]) {
      throwInvalid("depth", depths[j],
                   concat("at most ", depths[j - 1], ", that of the stage before; stage ", j,
                          " would wait for ever for its forwards"));
    }
  }
}

PipelineTable depthTable(const std::vector<int>& depths, int microbatches) {
  checkDepths(depths, microbatches);
  PipelineTable table(depths.size());
  for (int stage = 0; stage < static_cast<int>(depths.size()); ++stage) {
    auto& row = table[index(stage)];
    const int depth = depths[index(stage)];
    for (int m = 0; m < depth; ++m) {
      row.push_back({ActionKind::kForward, stage, m});
    }
    for (int m = 0; m < microbatches; ++m) {
      row.push_back({ActionKind::kBackward, stage, m});
      if (m + depth < microbatches) {
        row.push_back({ActionKind::kForward, stage, m + depth});
      }
    }
  }
  return table;
}

std::vector<int> classDepths(int stages, int microbatches) {
  checkStageCount(stages);
  checkMicrobatches(microbatches);
  std::vector<int> depths;
  depths.reserve(index(stages));
  for (int stage = 0; stage < stages; ++stage) {
    depths.push_back(std::min(microbatches, stages - stage));
  }
  return depths;
}

PipelineTable gpipeTable(int stages, int microbatches) {
  checkStageCount(stages);
  return depthTable(std::vector<int>(index(stages), microbatches), microbatches);
}

// Stage j begins with p - 1 - j forwards; then come F and I in turns, then Is. From the j-th of these on, each is
// followed by the next W; the other Ws come last.
PipelineTable zeroBubbleClassTable(int stages, int microbatches) {
  checkStageCount(stages);
  checkMicrobatches(microbatches);
  PipelineTable table(index(stages));
  for (int stage = 0; stage < stages; ++stage) {
    auto& row = table[index(stage)];
    const int warm_up = std::min(stages - 1 - stage, microbatches);
    for (int m = 0; m < warm_up; ++m) {
      row.push_back({ActionKind::kForward, stage, m});
    }
    for (int m = 0; m < microbatches; ++m) {
      if (m + warm_up < microbatches) {
        row.push_back({ActionKind::kForward, stage, m + warm_up});
      }
      row.push_back({ActionKind::kBackwardInput, stage, m});
      if (m >= stage) {
        row.push_back({ActionKind::kBackwardWeight, stage, m - stage});
      }
    }
    for (int m = std::max(0, microbatches - stage); m < microbatches; ++m) {
      row.push_back({ActionKind::kBackwardWeight, stage, m});
    }
  }
  return table;
}

}  // namespace torchext::core
