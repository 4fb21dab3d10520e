#include "core/kfac/factor_fusion.h"

#include <algorithm>

namespace torchext::core {

std::vector<int> fuseFactors(const std::vector<FusionTask>& tasks, const AlphaBeta& cost) {
  std::vector<int> ends;
  double link_free = 0;
  double ready = 0;
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    bytes += tasks[i].bytes;
    ready = std::max(ready, tasks[i].ready);
    const double start = std::max(ready, link_free);
    const double end = start + cost.seconds(bytes);
    if (i + 1 < tasks.size() && tasks[i + 1].root == tasks[i].root) {
      const double next = std::max(ready, tasks[i + 1].ready);
      if (next <= end && (next <= link_free || next - start < cost.alpha)) {
        continue;
      }
    }
    ends.push_back(static_cast<int>(i) + 1);
    link_free = end;
    bytes = 0;
  }
  return ends;
}

}  // namespace torchext::core
