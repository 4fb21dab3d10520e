// PortSearch adapts an order that was found for independent links to ranks whose transfers share a port.
//
// The searches before it simulate in mode "ideal", which is quick. Here a step is played as torch runs it: receives
// are posted where its runtime posts them, and ports are shared. One layer moves from a stage to another, or the depth
// of one stage by 1 or 2, while the step gets shorter; of a zero bubble it is the scheduler's limit that moves. Then
// depths fall while the step stays as fast, or within 1 % where that lowers the peak of memory. The work is bounded, so
// large pipelines get fewer moves. Deterministic; not for several threads.
#pragma once

#include "core/pipeline/family_search.h"
#include "core/pipeline/pipeline_simulator.h"

namespace torchext::core {

// Times that differ by less are equal, and memory decides.
inline constexpr double kAsFast = 0.01;

// One step of the order as torch runs it.
PipelineRun playAsTorch(OrderSearch& orders, const StageOrder& order);

class PortSearch {
 public:
  // The search outlives it. share: of the work that one plan may take.
  PortSearch(FamilySearch& search, double memory_bytes, double share = 1);

  // Of an order of that search, which fits. Seconds are those of playAsTorch.
  StageOrder improved(StageOrder order);

 private:
  // Fills in what is found by playing. False: it cannot be, or does not fit.
  bool play(StageOrder& order);
  bool offer(StageOrder order);
  bool moveLayer();
  bool moveDepth();
  bool lowered(std::size_t stage, double slowest);
  void shrink();
  std::vector<int>& depthsOf(StageOrder& order) const;

  FamilySearch& search_;
  double memory_bytes_;
  double left_;  // orders to play
  StageOrder now_;
};

}  // namespace torchext::core
