// stage_partition cuts a chain of layers into stages: seeds, all partitions, and a local search.
//
// A partition is the sizes of its stages. Moves: a layer across a boundary, or from any stage to any other (those
// between shift by one); the first improvement is taken, until there is none.
#pragma once

#include <functional>
#include <vector>

#include "core/pipeline/stage_costs.h"

namespace torchext::core {

using StageSizes = std::vector<int>;

// All partitions are tried up to so many of them: a plan is the optimum of its families then.
inline constexpr double kMostPartitions = 20000;

// C(L - 1, p - 1).
double partitionCount(int layers, int stages);
// In lexicographic order.
void forEachPartition(int layers, int stages, const std::function<void(const StageSizes&)>& visit);

// Even; least maximum of time; times that fall by 1 - phi / M from a stage to the next, phi = 1, or the forward's share
// with a split backward; least maximum of memory at 1F1B's depths. Without repeats.
std::vector<StageSizes> seedPartitions(const StageCosts& costs, int stages, int microbatches, bool split);

// score: lower is better; infinity: not possible. best: where to start, and the result.
double improvePartition(StageSizes& best, double best_score, const std::function<double(const StageSizes&)>& score,
                        int most_scores);

}  // namespace torchext::core
