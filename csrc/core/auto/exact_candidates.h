// exact_candidates lists the ways whose results are those of DDP, each with its best buckets.
#pragma once

#include <vector>

#include "core/auto/candidate_simulator.h"
#include "core/auto/search_options.h"

namespace torchext::core {

// In this order: DDP with its default buckets (the reference), DDP with the program's, dear replicated, dear sharded,
// each of these two by every transport. All but the first also with layers as rows, where that pays; where it pays
// nowhere a candidate "factors" says why.
std::vector<Candidate> exactCandidates(const StepProfile& profile, const LinkModel& link, const SearchOptions& options);

}  // namespace torchext::core
