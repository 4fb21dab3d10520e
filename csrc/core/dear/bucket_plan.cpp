#include "core/dear/bucket_plan.h"

#include <numeric>
#include <utility>

#include "core/base/check.h"

namespace torchext::core {
namespace {

int countOf(const auto& container) { return static_cast<int>(container.size()); }

}  // namespace

BucketPlan::BucketPlan(std::vector<std::size_t> tensor_bytes) : tensor_bytes_(std::move(tensor_bytes)) {
  if (tensor_bytes_.empty()) {
    throwInvalid("number of tensors", 0, "1 or more");
  }
  bucket_of_.reserve(tensor_bytes_.size());
}

BucketPlan::BucketPlan(std::vector<std::size_t> tensor_bytes, std::size_t limit_bytes)
    : BucketPlan(std::move(tensor_bytes)) {
  if (limit_bytes == 0) {
    throwInvalid("limit_bytes", limit_bytes, "1 or more");
  }
  std::size_t bytes = 0;
  for (int tensor = 0; tensor < tensorCount(); ++tensor) {
    const std::size_t own = tensor_bytes_[index(tensor)];
    // Written as a difference: a sum could wrap.
    const bool first = countOf(bucket_of_) == tensor;
    if (!first && (own > limit_bytes || bytes > limit_bytes - own)) {
      addBucket(tensor);
      bytes = 0;
    }
    bytes += own;
  }
  addBucket(tensorCount());
}

BucketPlan BucketPlan::fromEnds(std::vector<std::size_t> tensor_bytes, const std::vector<int>& ends) {
  BucketPlan plan(std::move(tensor_bytes));
  for (const int end : ends) {
    const int begin = countOf(plan.bucket_of_);
    if (end <= begin || end > plan.tensorCount()) {
      throwInvalid("end of a bucket", end, concat(begin + 1, "..", plan.tensorCount()));
    }
    plan.addBucket(end);
  }
  if (countOf(plan.bucket_of_) != plan.tensorCount()) {
    throwInvalid("end of the last bucket", plan.bucket_of_.size(), concat(plan.tensorCount(), ", the tensors"));
  }
  return plan;
}

// Tensors up to end that are in no bucket yet become one.
void BucketPlan::addBucket(int end) {
  Bucket bucket{countOf(bucket_of_), 0, 0};
  bucket.count = end - bucket.first;
  for (int tensor = bucket.first; tensor < end; ++tensor) {
    bucket_of_.push_back(bucketCount());
    bucket.bytes += tensor_bytes_[index(tensor)];
  }
  buckets_.push_back(bucket);
}

const Bucket& BucketPlan::bucket(int bucket) const {
  checkIndex("bucket", bucket, bucketCount());
  return buckets_[index(bucket)];
}

int BucketPlan::bucketOf(int tensor) const {
  checkIndex("tensor", tensor, tensorCount());
  return bucket_of_[index(tensor)];
}

std::size_t BucketPlan::totalBytes() const {
  return std::accumulate(tensor_bytes_.begin(), tensor_bytes_.end(), std::size_t{0});
}

}  // namespace torchext::core
