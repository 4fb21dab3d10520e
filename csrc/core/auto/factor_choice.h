// factor_choice says which layers send their batch rows instead of a gradient: sufficient factors (Zhang et al.,
// "Poseidon", USENIX ATC 2017), an exact way.
//
// A layer is eligible where its rows save more link time than the arithmetic that they add takes. Layers are tried by
// that gain, the largest first, and kept where the simulated step falls.
#pragma once

#include <functional>
#include <vector>

#include "core/auto/bucket_program.h"
#include "core/auto/link_model.h"
#include "core/auto/step_profile.h"

namespace torchext::core {

struct FactorGain {
  int layer = 0;
  double seconds = 0;  // saved on the link, less what is added to compute: above 0
};

// Bytes of all gradients of a layer.
std::size_t layerBytes(const StepProfile& profile, int layer);
// Of computing the layer's gradient from the rows of all ranks, and not from the own ones alone.
double extraFactorSeconds(const LayerRows& layer, const LinkModel& link);

// saved: link seconds of a message of the layer's bytes, which rows replace. Largest gain first, then by number.
std::vector<FactorGain> eligibleFactors(const StepProfile& profile, const LinkModel& link, const BucketCost& saved);

// step: seconds of a step with those layers as rows, ascending. Returns the chosen, ascending; maybe none.
std::vector<int> chooseFactors(const std::vector<FactorGain>& eligible,
                               const std::function<double(const std::vector<int>&)>& step);

}  // namespace torchext::core
