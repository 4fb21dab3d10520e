#include "core/auto/gradient_buckets.h"

#include <algorithm>
#include <utility>

#include "core/base/check.h"
#include "core/dear/bucket_plan.h"

namespace torchext::core {
namespace {

// Of different kinds: a bucket leaves when its last gradient is finished.
Buckets inOrderOfLeaving(Buckets buckets) {
  std::sort(buckets.begin(), buckets.end(), [](const auto& a, const auto& b) { return a.back() < b.back(); });
  return buckets;
}

}  // namespace

PositionsByKind gradientsByKind(const std::vector<Gradient>& gradients, const std::vector<int>& factor_layers) {
  PositionsByKind by_kind;
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    const auto& [bytes, ready_seconds, first_use, kind, layer] = gradients[i];
    if (layer >= 0 && std::binary_search(factor_layers.begin(), factor_layers.end(), layer)) {
      continue;
    }
    by_kind.resize(std::max(by_kind.size(), index(kind) + 1));
    by_kind[index(kind)].push_back(static_cast<int>(i));
  }
  std::erase_if(by_kind, [](const auto& positions) { return positions.empty(); });
  return by_kind;
}

Buckets bucketsOfEnds(const PositionsByKind& by_kind, const EndsByKind& ends) {
  Buckets buckets;
  for (std::size_t kind = 0; kind < by_kind.size(); ++kind) {
    auto begin = by_kind[kind].begin();
    for (const int end : ends[kind]) {
      const auto past = by_kind[kind].begin() + end;
      buckets.emplace_back(begin, past);
      begin = past;
    }
  }
  return inOrderOfLeaving(std::move(buckets));
}

EndsByKind uniformEnds(const std::vector<Gradient>& gradients, const PositionsByKind& by_kind,
                       std::size_t limit_bytes) {
  EndsByKind ends;
  for (const auto& positions : by_kind) {
    std::vector<std::size_t> bytes;
    bytes.reserve(positions.size());
    for (const int position : positions) {
      bytes.push_back(gradients[index(position)].bytes);
    }
    const BucketPlan plan(bytes, limit_bytes);
    auto& own = ends.emplace_back();
    for (int bucket = 0; bucket < plan.bucketCount(); ++bucket) {
      own.push_back(plan.bucket(bucket).first + plan.bucket(bucket).count);
    }
  }
  return ends;
}

Buckets ddpBuckets(const std::vector<Gradient>& gradients, std::size_t first_bytes, std::size_t limit_bytes) {
  Buckets buckets;
  for (const auto& positions : gradientsByKind(gradients)) {
    std::size_t limit = first_bytes;
    std::vector<int> bucket;
    for (const int position : positions) {
      bucket.push_back(position);
      if (bucketBytes(gradients, bucket) >= limit) {
        buckets.push_back(std::exchange(bucket, {}));
        limit = limit_bytes;
      }
    }
    if (!bucket.empty()) {
      buckets.push_back(std::move(bucket));
    }
  }
  return inOrderOfLeaving(std::move(buckets));
}

std::size_t bucketBytes(const std::vector<Gradient>& gradients, const std::vector<int>& bucket) {
  std::size_t sum = 0;
  for (const int position : bucket) {
    sum += gradients[index(position)].bytes;
  }
  return sum;
}

}  // namespace torchext::core
