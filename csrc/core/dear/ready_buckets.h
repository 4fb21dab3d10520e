// ReadyBuckets tells which buckets have all their gradients, in the one order in which all ranks send them.
//
// Gradients come in any order. A bucket is taken when it is complete and all buckets before it have been taken.
// A backward pass:
//   begin()      everything is missing
//   arrive(t)    for each gradient that comes; again before its bucket is taken: the last one counts
//   end()        what has not come will not: it is missing no more
// After arrive() and end(): take() until it has none.
//
// Threads: one at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace torchext::core {

class ReadyBuckets {
 public:
  ReadyBuckets() = default;
  // buckets[bucket]: positions below tensor_count, each at most once; std::invalid_argument otherwise.
  ReadyBuckets(std::vector<std::vector<std::int64_t>> buckets, std::size_t tensor_count);

  std::size_t size() const { return buckets_.size(); }
  const std::vector<std::int64_t>& tensorsOf(std::size_t bucket) const { return buckets_[bucket]; }

  void begin();
  // False, and nothing is changed: the bucket of this tensor has been taken. A tensor in no bucket is always in time.
  bool arrive(std::size_t tensor);
  bool hasArrived(std::size_t tensor) const { return arrived_[tensor] != 0; }
  // Of buckets that have not been taken: tensors that have not arrived, bucket by bucket.
  std::vector<std::int64_t> missing() const;
  void end();
  std::optional<std::size_t> take();

 private:
  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);

  std::vector<std::vector<std::int64_t>> buckets_;
  std::vector<std::size_t> bucket_of_;  // [tensor]
  std::vector<char> arrived_;           // [tensor]
  std::vector<std::size_t> missing_;    // [bucket] tensors that have not arrived
  std::size_t next_ = 0;                // the first bucket that has not been taken
};

}  // namespace torchext::core
