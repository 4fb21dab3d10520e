// bucket_ends reads an explicit partition of gradients into buckets, as a plan has it that was made before training.
//
// Gradients are places 0..L-1 in the order in which the plan expects them. ends[i] is one past the place of the last
// gradient of bucket i. The bucket has that gradient's kind (element type), and holds all gradients of this kind that
// no bucket before it has. So buckets are in the order in which they are complete.
// Everything here is a pure function. Errors: std::invalid_argument.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

namespace torchext::core {

// For each kind the ends of its buckets, counted in the gradients of that kind (BucketPlan::fromEnds). kinds: of each
// place. Throws unless ends ascend within 1..L and the last gradient of each kind is the last of a bucket.
std::map<int, std::vector<int>> endsByKind(const std::vector<int>& kinds, const std::vector<int>& ends);

// Whether gradients have come so that the buckets were complete one after the other, as planned. Order within a bucket
// is free. planned: a gradient for each place; observed: those that have come, which need not be all.
bool keepsBuckets(const std::vector<std::int64_t>& planned, const std::vector<int>& ends,
                  const std::vector<std::int64_t>& observed);

}  // namespace torchext::core
