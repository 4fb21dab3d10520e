// Placements say which rank inverts which factor: two ways to divide tasks among ranks by their costs.
//
// Pure functions, the same on every rank. Costs are seconds (or any unit), finite and 0 or more; `ranks` is 1 or more;
// std::invalid_argument otherwise. Results name the rank of each task.
#pragma once

#include <vector>

namespace torchext::core {

// The longest task first, each to the rank with the least so far (SPD-KFAC's load balancing, Shi et al., ICDCS 2021,
// algorithm 2). The largest load is at most 4/3 - 1/(3 ranks) of the optimum (Graham 1969). O(n log n + n ranks).
std::vector<int> balanceLoad(const std::vector<double>& costs, int ranks);

// Consecutive blocks, one a rank in the order of ranks, with the smallest largest sum there is, exactly, by a dynamic
// program (PAD-KFAC, Zhang et al., INFOCOM 2023: tasks keep their order so that neighbours fuse). Blocks may be empty.
//   best(e, r) = min over s <= e of max(best(s, r - 1), sum(s..e))
// O(n^2 ranks).
std::vector<int> splitInOrder(const std::vector<double>& costs, int ranks);

// The same in `rounds` rounds: the list is cut into as many consecutive parts of equal cost, and each of these into
// consecutive blocks, the largest of which goes to the rank with the least so far. Where tasks become ready in their
// order, every rank has work early, and the last tasks belong to different ranks.
std::vector<int> splitInRounds(const std::vector<double>& costs, int ranks, int rounds);

// The largest load of any rank.
double largestLoad(const std::vector<double>& costs, const std::vector<int>& rank_of, int ranks);

}  // namespace torchext::core
