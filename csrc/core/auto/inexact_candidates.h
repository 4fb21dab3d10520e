// inexact_candidates lists ways in which every worker has a model of its own in between, with their price rho.
#pragma once

#include <vector>

#include "core/auto/candidate_simulator.h"
#include "core/auto/search_options.h"

namespace torchext::core {

// One for each of options.inexact, in their order:
//   groups     the average of a group is a ring all-reduce of the whole model among its members, and compute is that of
//              the slowest of them
//   hop        a rank sends the whole model to each neighbour, and waits for nobody
//   beside     the step is the longer of compute and average ("cta", "parallel")
//   after      it is their sum ("atc", "serial")
// std::invalid_argument on a way, an order or a number of partners that cannot be.
std::vector<Candidate> inexactCandidates(const StepProfile& profile, const LinkModel& link,
                                         const SearchOptions& options);

}  // namespace torchext::core
