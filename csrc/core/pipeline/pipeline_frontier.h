// pipeline_frontier says how much time more memory buys: the best plan for each limit of memory, from the most down.
//
// Each point is the best under a limit just below the peak of the point before it. Where there are too many, limits
// fall by a factor that reaches the least memory in the given number of points.
#pragma once

#include <vector>

#include "core/pipeline/pipeline_candidates.h"

namespace torchext::core {

struct FrontierPoint {
  double memory_bytes = 0;  // the largest peak of a stage
  double seconds = 0;
  std::vector<int> sizes;
  std::vector<int> depths;
  OrderFamily order = OrderFamily::k1F1B;
  int data = 1;
  std::vector<bool> recompute;
};

// A limit that this peak just misses.
double justBelow(double peak_bytes);

// Memory rises, time falls strictly. most_points: 2 or more.
std::vector<FrontierPoint> pipelineFrontier(PipelineCandidates& candidates, double memory_bytes, int most_points);

}  // namespace torchext::core
