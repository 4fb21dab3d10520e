// ZeroBubbleScheduler builds a table of F, I and W by list scheduling.
//
// Of all actions that can be next on their ranks, the one that can start earliest is taken; at equal times I before F
// before W, then the lower stage. F waits while the stage has its limit in flight, which counts until W. A heuristic:
// within 1 % of the optimum on average in small cases, 14 % at worst. O(p) an action; not for several threads.
#pragma once

#include <cstddef>
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
    int forwards = 0;  // done, as are the next two
    int inputs = 0;
    int weights = 0;
    double free = 0;           // the rank
    double sent_forward = 0;   // the link to the next stage
    double sent_backward = 0;  // the link to the stage before
    ActionKind next = ActionKind::kForward;
  };
  // The action that stage does next, and its start; infinity where it is not known yet.
  void choose(std::size_t stage);
  void take(std::size_t stage);

  int microbatches_;
  const std::vector<StageTimes>* stages_ = nullptr;  // of schedule(), as are the limits
  const std::vector<int>* limits_ = nullptr;
  std::vector<Row> rows_;
  std::vector<double> starts_;          // [stage]
  std::vector<double> arrived_inputs_;  // [stage][micro-batch]
  std::vector<double> arrived_gradients_;
  std::vector<std::vector<ActionKind>> kinds_;  // [stage] what it does
  std::vector<int> most_in_flight_;
};

}  // namespace torchext::core
