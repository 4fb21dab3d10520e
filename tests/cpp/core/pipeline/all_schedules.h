// The fastest of all in-order schedules, found by trying every one: an oracle that shares no code with csrc/core.
#pragma once

#include <string>
#include <vector>

#include "core/pipeline/pipeline_profile.h"

namespace torchext::core::testing {

// One stage's actions, in order of micro-batches: "FFBB", or with a split backward "FIFWIW".
using Sequence = std::string;

// All sequences with at most `limit` in flight.
std::vector<Sequence> allSequences(int microbatches, int limit, bool split);

// Infinity: a deadlock. One sequence a stage; a transfer starts when it is sent, one after the other.
double playedSeconds(const std::vector<StageTimes>& stages, const std::vector<const Sequence*>& sequences);

// The least over all choices of sequences; `known`: nothing is below it, and it ends the search.
double fastestSchedule(const std::vector<StageTimes>& stages, int microbatches, const std::vector<int>& limits,
                       bool split, double known = 0);

}  // namespace torchext::core::testing
