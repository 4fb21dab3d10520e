// ZeroBubbleScheduler builds a table of F, I and W by list scheduling.
//
// Of all actions that can be next on their ranks, the one that can start earliest is taken; at equal times I before F
// before W, then the lower stage. F waits while the stage has its limit in flight, which counts until W. A heuristic:
// within 1 % of the optimum on average in small cases, 14 % at worst. O(p) an action; not for several threads.
#pragma once

#include <vector>

#include "core/pipeline/pipeline_profile.h"
#include "core/pipeline/pipeline_table.h"

namespace torchext::core {

class ZeroBubbleScheduler {
 public:
  explicit ZeroBubbleScheduler(int microbatches) : microbatches_(microbatches) {}

  // [stage] limits of 1 or more. The end of the last action and of its sync, as simulateTable in mode "ideal" has it.
  double schedule(const std::vector<StageTimes>& stages, const std::vector<int>& limits);
  // Of the last schedule().
  PipelineTable table() const;
  const std::vector<int>& mostInFlight() const { return most_in_flight_; }

 private:
  struct Row {
    int forwards = 0, inputs = 0, weights = 0;  // done
    double free = 0;
    double sent_forward = 0, sent_backward = 0;  // the links are free
    double start = 0;                            // of the next action
    ActionKind next = ActionKind::kForward;
  };
  void choose(int stage);
  void take(int stage);

  int microbatches_;
  const std::vector<StageTimes>* stages_ = nullptr;
  const std::vector<int>* limits_ = nullptr;
  std::vector<Row> rows_;
  std::vector<double> inputs_, gradients_;  // [stage][micro-batch] when they have arrived
  std::vector<std::vector<ActionKind>> kinds_;
  std::vector<int> most_in_flight_;
};

}  // namespace torchext::core
