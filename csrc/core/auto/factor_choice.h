// factor_choice says which layers send their batch rows instead of a gradient: sufficient factors (Zhang et al.,
// "Poseidon", USENIX ATC 2017), an exact way.
//
// A layer is eligible where its rows save link time by more than the arithmetic that they add. Layers are taken by that
// gain, the largest first, while the simulated step falls.
#pragma once

#include <functional>
#include <vector>

#include "core/auto/link_model.h"
#include "core/auto/step_profile.h"

namespace torchext::core {

struct FactorGain {
  int layer = 0;
  double seconds = 0;  // saved on the link, less what is added to compute: above 0
};

// sharded: every rank computes its own slice only, which adds nothing; and the parameter is still gathered.
// whole_reduce: two halves saved (an all-reduce), else one. Largest gain first, then by number.
std::vector<FactorGain> eligibleFactors(const StepProfile& profile, const LinkModel& link, bool sharded);

// seconds: of a step with those layers as rows, ascending numbers. std::vector of the chosen, ascending; may be empty.
std::vector<int> chooseFactors(const std::vector<FactorGain>& eligible, double without_seconds,
                               const std::function<double(const std::vector<int>&)>& seconds);

}  // namespace torchext::core
