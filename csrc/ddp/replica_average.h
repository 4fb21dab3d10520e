// ReplicaAverage: the exact average of all workers' replicas, what decentralized training evaluates and ends with.
//
// An all-reduce over all ranks, bucket by bucket, in the buckets' own memory; the same bits on every rank. enter()
// keeps the local values until leave() brings them back: a copy of the model meanwhile.
//
// Threads: one at a time, and nobody else uses the buckets or their tensors meanwhile.
#pragma once

#include <cstddef>
#include <vector>

#include <ATen/ATen.h>

#include "c10d/attachable_backend.h"
#include "ddp/flat_buckets.h"

namespace torchext {

class ReplicaAverage {
 public:
  // buckets: of the parameters, then of the buffers; they outlive this object, as the group does.
  ReplicaAverage(AttachableBackend& group, const FlatBuckets& parameters, const FlatBuckets& buffers);

  // Collective. The tensors become the average. Returns ||x - mean|| / ||mean|| of this worker's parameters.
  double form();
  // c10::Error between enter() and leave(): the local values would be lost.
  void checkNotEntered() const;
  // Collective: form(), remembering the local values.
  double enter();
  // Local: the values before enter(). Harmless without it.
  void leave();

 private:
  AttachableBackend& group_;
  std::vector<const FlatBucket*> buckets_;
  std::size_t parameter_buckets_;
  std::vector<at::Tensor> local_values_;
};

}  // namespace torchext
