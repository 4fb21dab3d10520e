// ReplicaAverage: the exact average of all workers' replicas, what decentralized training evaluates and ends with.
//
// An all-reduce over all ranks, bucket by bucket; the same bits on every rank. Parameters are summed in their buckets'
// own memory, those of 16 bits as float32, so that what is the same everywhere stays so; buffers and frozen parameters
// as buffer_mean.h says. enter() keeps the local values until leave() brings them back: a copy of the model meanwhile.
//
// Threads: one at a time, and nobody else uses the buckets or their tensors meanwhile.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include <ATen/ATen.h>

#include "c10d/backend/attachable_backend.h"
#include "ddp/common/flat_buckets.h"
#include "ddp/common/frozen_parameters.h"

namespace torchext {

class ReplicaAverage {
 public:
  // The buckets outlive this object, as the group does. frozen: what has no buckets.
  ReplicaAverage(AttachableBackend& group, const FlatBuckets& parameters, const FlatBuckets& buffers,
                 FrozenParameters frozen);

  // Collective. The tensors become the average. Returns ||x - mean|| / ||mean|| of this worker's trained parameters.
  double form();
  // c10::Error between enter() and leave(): the local values would be lost.
  void checkNotEntered() const;
  // Collective: form(), remembering the local values.
  double enter();
  // Local: the values before enter(). Harmless without it.
  void leave();

 private:
  void meet();
  double average();

  AttachableBackend& group_;
  const FrozenParameters frozen_;
  const std::vector<const FlatBucket*> trained_;  // parameters, then buffers
  const std::size_t parameter_buckets_;
  std::unique_ptr<FlatBuckets> differing_;  // of frozen parameters; null: none
  std::vector<const FlatBucket*> buckets_;  // trained ones, then differing ones
  std::vector<at::Tensor> local_values_;
};

}  // namespace torchext
