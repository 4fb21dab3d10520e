// depth_search finds the warm-up depths with which given stages are fastest.
//
// From three seeds (p - j, 2 (p - j) - 1, as many as allowed) one or two stages move by 1 or 2 while the time falls;
// then depths shrink while it stays. Equal to trying all depths in every random case that was tried. The limits are
// made non-rising first, for depths are.
#pragma once

#include <vector>

#include "core/pipeline/depth_simulator.h"

namespace torchext::core {

struct DepthChoice {
  std::vector<int> depths;  // none: some limit is 0
  double seconds = 0;
};

// [stage] limits, cut to M. seed: depths to start from in place of the three, a quicker search; none: the three.
DepthChoice searchDepths(DepthSimulator& simulator, const std::vector<StageTimes>& stages, std::vector<int> limits,
                         const std::vector<int>& seed = {});

}  // namespace torchext::core
