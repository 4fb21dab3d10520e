// exampleInversion() makes a factor and inverts it as the engine will, for a clock.
#pragma once

#include <cstdint>
#include <functional>

#include <ATen/ATen.h>

#include "kfac/comm/kfac_context.h"
#include "kfac/factors/factor_accumulator.h"

namespace torchext {

// Inverts the same factor in each call. generator: the script's numbers stay its own.
std::function<void()> exampleInversion(const KfacContext& context, const FactorAccumulator& accumulator,
                                       std::int64_t dim, const at::Generator& generator);

}  // namespace torchext
