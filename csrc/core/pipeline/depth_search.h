// DepthSearch finds the warm-up depths with which given stages are fastest.
//
// From three seeds (p - j, 2 (p - j) - 1, as many as allowed) one or two stages move by 1 or 2 while the time falls;
// then depths shrink while it stays. Equal to trying all depths in every random case that was tried. Depths never rise
// from a stage to the next, so limits are made so first. Not for several threads.
#pragma once

#include <cstddef>
#include <vector>

#include "core/pipeline/depth_simulator.h"

namespace torchext::core {

struct DepthChoice {
  std::vector<int> depths;  // none: a limit is 0, or nothing is below
  double seconds = 0;
};

class DepthSearch {
 public:
  explicit DepthSearch(int microbatches) : simulator_(microbatches) {}

  // [stage] limits, cut to the micro-batches.
  DepthChoice best(const std::vector<StageTimes>& stages, std::vector<int> limits);
  // Quicker: starts from the last answer, too, moves one stage at a time, and gives up where the seeds are not near
  // `below`. Infinity: takes the seeds' best, and climbs from it.
  DepthChoice near(const std::vector<StageTimes>& stages, std::vector<int> limits, double below);
  // Of those depths.
  double seconds(const std::vector<StageTimes>& stages, const std::vector<int>& depths) {
    return simulator_.seconds(stages, depths);
  }
  int microbatches() const { return simulator_.microbatches(); }

 private:
  void begin(const std::vector<StageTimes>& stages, std::vector<int> limits, double most_actions);
  DepthChoice evaluated(std::vector<int> depths);
  void climb(bool pairs);
  bool allowed(const std::vector<int>& depths) const;
  bool offer(const std::vector<int>& depths);
  bool moveOne();
  bool moveTwo();
  bool lowered(std::size_t stage);
  void shrink();
  bool atBound() const;

  DepthSimulator simulator_;
  const std::vector<StageTimes>* stages_ = nullptr;  // of the question, as are the next ones
  std::vector<int> limits_;
  double least_ = 0;
  double left_ = 0;  // simulations
  DepthChoice now_;
  std::vector<int> moved_;
  std::vector<int> last_;  // the last answer
};

}  // namespace torchext::core
