// ZeroBubbleSearch tries the zero bubbles there are for given stages, and keeps the fastest.
//
// They are list scheduling with as many in flight as the limits allow, with at most 2 p - 1 and with at most p, and the
// order of torch's ScheduleInterleavedZeroBubble. Tight ones, with p or less in flight on every stage, are fragile:
// they are ranked by the time that they take with transfers and overheads 5 % longer. Not for several threads.
#pragma once

#include <vector>

#include "core/pipeline/zero_bubble_scheduler.h"

namespace torchext::core {

struct ZeroBubbleChoice {
  std::vector<int> depths;  // most in flight
  std::vector<int> limits;  // of the scheduler; none: torch's order
  double seconds = 0;
  double ranked_seconds = 0;
};

class ZeroBubbleSearch {
 public:
  ZeroBubbleSearch(int microbatches, double overhead_seconds)
      : microbatches_(microbatches), overhead_seconds_(overhead_seconds), scheduler_(microbatches) {}

  // [stage] limits of 1 or more.
  ZeroBubbleChoice best(const std::vector<StageTimes>& stages, const std::vector<int>& limits);
  // Quicker: of these only the one that was best in the last answer of best().
  ZeroBubbleChoice near(const std::vector<StageTimes>& stages, const std::vector<int>& limits);
  PipelineTable table(const std::vector<StageTimes>& stages, const std::vector<int>& limits);

 private:
  double rankedSeconds(const std::vector<StageTimes>& stages, const PipelineTable& table) const;
  ZeroBubbleChoice scheduled(const std::vector<StageTimes>& stages, std::vector<int> limits);
  ZeroBubbleChoice ofTorch(const std::vector<StageTimes>& stages) const;

  int microbatches_;
  double overhead_seconds_;
  ZeroBubbleScheduler scheduler_;
  int last_cap_ = 0;  // on the limits; 0: none yet
};

}  // namespace torchext::core
