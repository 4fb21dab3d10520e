#include "core/dear/ready_buckets.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "core/base/check.h"

namespace torchext::core {

ReadyBuckets::ReadyBuckets(std::vector<std::vector<std::int64_t>> buckets, std::size_t tensor_count)
    : buckets_(std::move(buckets)),
      bucket_of_(tensor_count, kNone),
      arrived_(tensor_count, 0),
      missing_(buckets_.size(), 0) {
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    for (const std::int64_t tensor : buckets_[b]) {
      if (tensor < 0 || index(tensor) >= tensor_count || bucket_of_[index(tensor)] != kNone) {
        throwInvalid("tensor of a bucket", tensor, concat("0..", tensor_count, " exclusive, in one bucket"));
      }
      bucket_of_[index(tensor)] = b;
    }
  }
  next_ = buckets_.size();  // no pass has begun
}

void ReadyBuckets::begin() {
  std::fill(arrived_.begin(), arrived_.end(), 0);
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    missing_[b] = buckets_[b].size();
  }
  next_ = 0;
}

bool ReadyBuckets::arrive(std::size_t tensor) {
  const std::size_t bucket = bucket_of_[tensor];
  if (bucket < next_) {
    return false;
  }
  if (std::exchange(arrived_[tensor], 1) == 0 && bucket != kNone) {
    --missing_[bucket];
  }
  return true;
}

std::vector<std::int64_t> ReadyBuckets::missing() const {
  std::vector<std::int64_t> result;
  for (std::size_t b = next_; b < buckets_.size(); ++b) {
    std::copy_if(buckets_[b].begin(), buckets_[b].end(), std::back_inserter(result),
                 [this](std::int64_t tensor) { return arrived_[index(tensor)] == 0; });
  }
  return result;
}

void ReadyBuckets::end() { std::fill(missing_.begin(), missing_.end(), 0); }

std::optional<std::size_t> ReadyBuckets::take() {
  return next_ < buckets_.size() && missing_[next_] == 0 ? std::optional(next_++) : std::nullopt;
}

}  // namespace torchext::core
