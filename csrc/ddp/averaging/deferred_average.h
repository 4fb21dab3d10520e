// DeferredAverage averages parameters that a forward or a backward may be using, and adds what that changes later.
//
// Others may wait in an average for this worker while it waits for them (outstanding_averages.h). It sends what it has,
// and keeps the difference that the average makes until the next step. That costs a copy of the parameters meanwhile.
//
// Threads: one at a time. The owner's lock keeps the averaging thread and the training thread apart.
#pragma once

#include <cstddef>
#include <vector>

#include <ATen/ATen.h>

#include "ddp/averaging/group_reducer.h"
#include "ddp/averaging/group_source.h"
#include "ddp/averaging/model_buckets.h"
#include "ddp/common/tensors_in_place.h"

namespace torchext {

class DeferredAverage {
 public:
  // All outlive this object.
  DeferredAverage(const ModelBuckets& buckets, TensorsInPlace& tensors, GroupReducer& reducer)
      : buckets_(buckets), tensors_(tensors), reducer_(reducer) {}

  // With the group, over the local values and the differences that they have yet to get. Writes no tensor of the model.
  void average(const AssignedGroup& group);
  // A difference that another average of this bucket has made. nonnegative: of buffers, elementwise, whether it was
  // formed from numbers that are not negative.
  void add(std::size_t index, const at::Tensor& difference, const at::Tensor& nonnegative);
  // Adds the differences to the model's tensors. heed_writes: a parameter that has been written since keeps what was
  // written; not where only the optimizer writes.
  void apply(bool heed_writes);

 private:
  void noteSigns(std::size_t index, const at::Tensor& nonnegative);

  const ModelBuckets& buckets_;
  TensorsInPlace& tensors_;
  GroupReducer& reducer_;
  std::vector<at::Tensor> differences_;  // by bucket: to be added before the next step; empty: nothing
  std::vector<at::Tensor> signs_;        // of buffers: where keepSign() may hold a sum's sign
};

}  // namespace torchext
