// partition_search looks for dear's buckets: both halves of an all-reduce share one partition, and no exact program is
// known for that.
//
// Seeds are the bucket program's ends, twelve uniform limits and one bucket. From the best of them it moves: drop a
// boundary, shift one, add one, in a fixed order, and takes the first improvement until there is none or the
// simulations are spent. Deterministic.
#pragma once

#include <functional>
#include <vector>

#include "core/auto/bucket_program.h"

namespace torchext::core {

inline constexpr int kMostSimulations = 2000;

struct PartitionSearch {
  EndsByKind ends;
  double step_seconds = 0;
  int simulations = 0;
};

// reduce: the link's seconds of a bucket's reduce-scatter, for the program. step: seconds of a step with those ends.
PartitionSearch searchPartition(const std::vector<Gradient>& gradients, const PositionsByKind& by_kind,
                                const BucketCost& reduce, const std::function<double(const EndsByKind&)>& step,
                                int most_simulations = kMostSimulations);

}  // namespace torchext::core
