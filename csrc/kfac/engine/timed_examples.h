// Work as the engine will do it, of example matrices, for a clock (kfac_planner.h). Each call says how much it does.
#pragma once

#include <cstdint>
#include <functional>

#include <ATen/ATen.h>

#include "kfac/comm/kfac_context.h"
#include "kfac/factors/factor_accumulator.h"

namespace torchext {

// Inversions of the same factor. generator: the script's numbers stay its own.
std::function<int()> exampleInversion(const KfacContext& context, const FactorAccumulator& accumulator,
                                      std::int64_t dim, const at::Generator& generator);
// Products of two square matrices, as directions are made of.
std::function<int()> exampleProducts(const KfacContext& context, const at::TensorOptions& options, std::int64_t size,
                                     bool tiles);

}  // namespace torchext
