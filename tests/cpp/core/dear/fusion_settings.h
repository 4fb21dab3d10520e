// Models on networks as inputs of the simulator of core/auto: what tests of tensor fusion are tried on.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "core/auto/link_model.h"
#include "core/auto/step_profile.h"

namespace torchext::core::testing {

constexpr double kMb = 1 << 20;  // bytes

// A model in float32, trained with data parallelism.
struct FusionSetting {
  std::string name;
  StepProfile profile;
  LinkModel link;

  // Iteration time of dear with that bucket limit.
  double seconds(double limit_mb) const;
};

// Two convolutional models of many small tensors, one of few large ones, three transformers; 16 to 512 ranks,
// 10 to 200 Gb/s. Compute times are those of a recent GPU by order of magnitude.
const std::vector<FusionSetting>& fusionSettings();

}  // namespace torchext::core::testing
