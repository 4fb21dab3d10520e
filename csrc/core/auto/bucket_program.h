// bucket_program finds the buckets whose all-reduces end first, exactly, by a dynamic program.
//
// Gradients 1..L in ready order share one FIFO link:
//   finish(e) = min over s < e of max(ready_e, finish(s)) + cost(bytes of s+1..e)
// An earlier finish of a prefix never hurts, so this holds for any cost that depends on bytes alone (MG-WFBP, Shi et
// al., INFOCOM 2019, for straight lines). O(L^2) time, and as much again for ties, more only where costs ask for many
// buckets.
//
// Ties: fewer buckets, then the larger last one, then the larger one before it. Finishes that differ by less than one
// part in 10^9 are ties, for sums are rounded.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "core/auto/gradient_buckets.h"

namespace torchext::core {

// Seconds on the link of one bucket, from its bytes.
using BucketCost = std::function<double(std::size_t)>;

struct BucketProgram {
  std::vector<int> ends;  // one past the last gradient of each bucket
  double finish_seconds = 0;
};

// ready[i]: not descending or, where it is, its running maximum counts. One gradient or more.
BucketProgram optimalBuckets(const std::vector<double>& ready, const std::vector<std::size_t>& bytes,
                             const BucketCost& cost);

// The same for gradients of several kinds: a program for each kind as though it had the link to itself, which is exact
// for one kind and a heuristic for several.
EndsByKind optimalEnds(const std::vector<Gradient>& gradients, const PositionsByKind& by_kind, const BucketCost& cost);

}  // namespace torchext::core
