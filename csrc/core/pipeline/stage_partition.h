// stage_partition cuts a chain of layers into stages: seeds, all partitions, and a local search.
//
// A partition is the sizes of its stages. The search moves one layer across a boundary, or from any stage to any other,
// where those between shift by one; it takes the first improvement, until there is none.
#pragma once

#include <functional>
#include <vector>

#include "core/pipeline/stage_costs.h"

namespace torchext::core {

using StageSizes = std::vector<int>;

// C(L - 1, p - 1).
double partitionCount(int layers, int stages);
// In lexicographic order.
void forEachPartition(int layers, int stages, const std::function<void(const StageSizes&)>& visit);

// cost(stage, first, last) of layers first..last as that stage; the sizes whose largest cost is least, of these the
// first in lexicographic order that the program meets. O(p L^2).
StageSizes leastMaximum(int layers, int stages, const std::function<double(int, int, int)>& cost);

// Even; least maximum of time; times that fall by 1 - phi / M from a stage to the next, phi = 1, or with a split
// backward the forward's share; least maximum of memory at 1F1B's depths. Without repeats.
std::vector<StageSizes> seedPartitions(const StageCosts& costs, int stages, int microbatches, bool split);

// The cut of costs whose stages come closest to the shares, from the first on; each has a layer. share: of each stage.
StageSizes sharedPartition(const std::vector<double>& layer_costs, const std::vector<double>& shares);

// accept(sizes): whether it is better than what was accepted before it. At most so many questions. sizes: from where,
// itself accepted, and the result.
void improvePartition(StageSizes& sizes, const std::function<bool(const StageSizes&)>& accept, int most_questions);

}  // namespace torchext::core
