// strategy_search lists every way of synchronising gradients with its predicted step, and says why it is chosen or not.
//
//   StepProfile (the model) + LinkModel (the network) -> candidates, best first -> the chosen one
// Exact candidates: DDP with its default buckets (the reference), DDP with the program's buckets, dear sharded and dear
// replicated by every transport, and all but the first with layers as rows. Inexact ones are listed beside them, and
// chosen only by name.
// Pure and deterministic, one thread; less than a second for 1,000 tensors.
#pragma once

#include <vector>

#include "core/auto/candidate_simulator.h"
#include "core/auto/search_options.h"

namespace torchext::core {

inline constexpr double kLeastGain = 0.03;

// Exact ones that are possible by step time, then the impossible, then the inexact by step time. The network has two
// ranks or more. std::invalid_argument on a bad profile or option.
std::vector<Candidate> searchStrategies(const StepProfile& profile, const LinkModel& link,
                                        const SearchOptions& options = {});

}  // namespace torchext::core
