// kfac_placement says who inverts and who preconditions, by strategy: the first half of a plan (kfac_plan.h), over the
// placements of placement.h. SPD by load where a broadcast is cheaper than inverting everywhere, PAD in blocks in
// order, KAISA's and DP's by whole layers.
#pragma once

#include "core/kfac/kfac_plan.h"

namespace torchext::core {

// Fills factors, workers and layer_owner of a plan whose strategy and ranks are set, and which begins as "all ranks do
// everything". input has been checked.
void placeFactors(KfacPlan& plan, const KfacPlanInput& input);

}  // namespace torchext::core
