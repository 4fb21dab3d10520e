// gradient_buckets cuts gradients into buckets: runs of gradients of one kind, in the order in which they are ready.
#pragma once

#include <cstddef>
#include <vector>

#include "core/auto/step_profile.h"

namespace torchext::core {

// [bucket] positions of gradients, ascending; buckets in the order in which they leave: that of their last gradients.
using Buckets = std::vector<std::vector<int>>;

// [kind] positions of gradients of that kind, ascending; kinds without any are left out.
using PositionsByKind = std::vector<std::vector<int>>;
// [kind] one past the last of each bucket, counted in the positions of that kind.
using EndsByKind = std::vector<std::vector<int>>;

// All but those of the given layers, which are ascending.
PositionsByKind gradientsByKind(const std::vector<Gradient>& gradients, const std::vector<int>& factor_layers = {});

Buckets bucketsOfEnds(const PositionsByKind& by_kind, const EndsByKind& ends);

// A bucket closes before it would exceed the limit, as dear's do.
EndsByKind uniformEnds(const std::vector<Gradient>& gradients, const PositionsByKind& by_kind, std::size_t limit_bytes);

// DistributedDataParallel's own: a bucket closes when it has reached its limit, 1 MiB for the first of a kind.
inline constexpr std::size_t kDdpFirstBucketBytes = std::size_t{1} << 20U;
inline constexpr std::size_t kDdpBucketBytes = std::size_t{25} << 20U;
Buckets ddpBuckets(const std::vector<Gradient>& gradients, std::size_t first_bytes = kDdpFirstBucketBytes,
                   std::size_t limit_bytes = kDdpBucketBytes);

std::size_t bucketBytes(const std::vector<Gradient>& gradients, const std::vector<int>& bucket);

}  // namespace torchext::core
