// GroupReducer adds up a model's buckets over the members of a group, in the buckets' own memory.
//
// What is the same on all members must come out as it went in. So parameters are summed in their dtype and scaled where
// they are copied back; buffers are summed as buffer_mean.h says; float16 is divided on the way, or its sum is
// infinite.
//
// Threads: addUp() and finished() are the averaging thread's, as are connect() and disconnect() while it does not run.
// scaleOf() and meanOf() read a bucket that is not pending, on any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include <ATen/ATen.h>

#include "c10d/transport/subset_allreduce.h"
#include "ddp/averaging/group_source.h"
#include "ddp/averaging/model_buckets.h"
#include "ddp/averaging/shared_stats.h"

namespace torchext {

class GroupReducer {
 public:
  static constexpr std::size_t kMaxBuckets = 65536;  // their numbers are the low digits of a call's

  // Both outlive this object.
  GroupReducer(const ModelBuckets& buckets, SharedStats& stats) : buckets_(buckets), stats_(stats) {}

  // From attach to leaving: what is connected holds the inner groups, which end with the process group.
  void connect(std::unique_ptr<SubsetAllreduce> partial) { partial_ = std::move(partial); }
  void disconnect() { partial_ = nullptr; }

  // Over the group: what scaleOf() makes a mean.
  void addUp(std::size_t index, const AssignedGroup& group);
  // By which to multiply what addUp() has left in the bucket.
  double scaleOf(std::size_t index, std::int64_t members) const;
  // Of what addUp() has left: a new tensor.
  at::Tensor meanOf(std::size_t index, std::int64_t members) const;
  // Counts an average, whose buckets are all added up.
  void finished(const AssignedGroup& group);
  // Waited until all members were there, since connect().
  double peerSeconds() const { return partial_->peerSeconds(); }

 private:
  const ModelBuckets& buckets_;
  SharedStats& stats_;
  std::unique_ptr<SubsetAllreduce> partial_;  // null: not connected
};

}  // namespace torchext
