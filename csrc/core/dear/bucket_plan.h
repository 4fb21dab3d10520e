// BucketPlan says which gradients travel together: tensor fusion for DeAR (Zhang et al., "DeAR", ICDCS 2023: decoupled
// all-reduce and its tensor fusion).
//
// Tensors are positions 0..L-1 in the order in which the backward pass finishes their gradients; a bucket is a run of
// consecutive ones. All tensors of a plan have one element type and device: make one plan for each. Everything here is
// a pure value, computed alike by every rank from equal arguments; nothing measures, sends or allocates buffers.
// Sizes are bytes. Errors: std::invalid_argument on a bad argument, std::out_of_range on an index.
#pragma once

#include <cstddef>
#include <vector>

namespace torchext::core {

// Tensors first .. first + count - 1, and their bytes together.
struct Bucket {
  int first = 0;
  int count = 0;
  std::size_t bytes = 0;
  friend bool operator==(const Bucket&, const Bucket&) = default;
};

// The buckets of a model: in order, disjoint, none empty, covering all tensors. Bucket 0 is the first to be reduced and
// the last that the next forward pass needs. O(L).
class BucketPlan {
 public:
  // Greedy: a bucket takes the next tensor as long as it stays within limit_bytes. A tensor larger than that is alone.
  // There must be one tensor at least, and limit_bytes 1 or more. Tensors of 0 bytes are allowed.
  BucketPlan(std::vector<std::size_t> tensor_bytes, std::size_t limit_bytes);
  // ends[i] is one past the last tensor of bucket i: strictly ascending, the first 1 or more, the last L.
  static BucketPlan fromEnds(std::vector<std::size_t> tensor_bytes, const std::vector<int>& ends);

  int tensorCount() const { return static_cast<int>(tensor_bytes_.size()); }
  int bucketCount() const { return static_cast<int>(buckets_.size()); }
  const Bucket& bucket(int bucket) const;
  int bucketOf(int tensor) const;
  std::size_t totalBytes() const;

 private:
  explicit BucketPlan(std::vector<std::size_t> tensor_bytes);
  void addBucket(int end);

  std::vector<std::size_t> tensor_bytes_;
  std::vector<Bucket> buckets_;
  std::vector<int> bucket_of_;  // [tensor]
};

}  // namespace torchext::core
