// ShardBuckets: the staging buffers of DeAR, in which gradients travel to their owners and parameters come back.
//
// One set of buffers for both: a bucket's gradients are packed for the reduce-scatter; what arrives in the own chunk is
// this rank's share of the gradient. Sharded form: after the optimizer's step the own slices of the parameters take its
// place, and the all-gather fills in everybody else's. Replicated form: it is gathered itself. How a chunk is laid out:
// shard_layout.h. A parameter's elements are counted in memory order, so any dense layout (channels_last) will do.
//
// Threads: a bucket belongs to one thread at a time; its owner (bucket_exchanges.h) hands it over.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/ATen.h>

#include "core/dear/shard_layout.h"

namespace torchext {

// The slice of a dense tensor that `rank` owns: 1-D, in memory order, sharing its memory.
at::Tensor ownSlice(const at::Tensor& tensor, int world_size, int rank);

// Whether the elements of a gradient lie in memory as its parameter's do.
bool sameMemoryOrder(const at::Tensor& gradient, const at::Tensor& parameter);

class ShardBuckets {
 public:
  // parameters: on one device, dense; those that need no gradient are in no bucket. order: positions in parameters in
  // the order in which their gradients are expected; a bucket closes before it would exceed limit_bytes. ends: explicit
  // buckets instead (core/dear/bucket_ends.h); empty: by limit_bytes.
  ShardBuckets(const std::vector<at::Tensor>& parameters, const std::vector<std::int64_t>& order,
               std::size_t limit_bytes, const std::vector<int>& ends, int rank, int world_size);

  // What ends may be for these; std::invalid_argument else.
  static void checkEnds(const std::vector<at::Tensor>& parameters, const std::vector<std::int64_t>& order,
                        const std::vector<int>& ends);

  std::size_t size() const { return buckets_.size(); }
  const std::vector<std::int64_t>& tensorsOf(std::size_t bucket) const { return buckets_[bucket].tensors; }
  bool holds(std::size_t tensor) const { return place_[tensor].bucket != kNone; }
  std::size_t bucketOf(std::size_t tensor) const { return place_[tensor].bucket; }
  // The tensor has been given other memory; false if not of the same layout, and then nothing is changed. Nothing may
  // be under way.
  bool follow(std::size_t tensor, const at::Tensor& moved);
  const at::Tensor& buffer(std::size_t bucket) const { return buckets_[bucket].buffer; }
  // Of the gradients in it.
  std::size_t bytesOf(std::size_t bucket) const { return buckets_[bucket].bytes; }
  std::size_t stagingBytes() const;

  // Gradients of tensorsOf(bucket), dense. Undefined: this rank has none; zeros travel, and a mark that says so.
  // float16: divided by the world size first, as DDP does: the ranks' sum is infinite where their mean is not.
  void packGradients(std::size_t bucket, const std::vector<at::Tensor>& gradients);
  // The mean is the sum over the ranks of what was packed, times this.
  double meanScale(std::size_t bucket) const;
  // Right after the reduce-scatter, on CUDA the one point that waits for the device.
  void readMarks(std::size_t bucket);
  // Then: whether any rank had a gradient; and the own slice of the sum, a view of the buffer.
  bool hasGradient(std::size_t tensor) const;
  at::Tensor gradient(std::size_t tensor) const;

  // After an all-gather of the gradients: the whole ones of tensorsOf(bucket), into tensors like their parameters;
  // undefined: not wanted.
  void unpackGradients(std::size_t bucket, const std::vector<at::Tensor>& targets) const;

  void packParameters(std::size_t bucket);
  void unpackParameters(std::size_t bucket);

 private:
  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);
  struct Bucket {
    std::vector<std::int64_t> tensors;
    core::ShardLayout layout;
    at::Tensor buffer;
    at::Tensor one;  // a mark
    std::size_t bytes;
    std::vector<char> marked;  // [place in tensors] readMarks() found a gradient
  };
  struct Place {
    std::size_t bucket = kNone;
    int index = 0;  // in the bucket
  };

  std::vector<at::Tensor> parameters_;  // detached
  std::vector<Bucket> buckets_;
  std::vector<Place> place_;  // [tensor]
  int rank_;
  int world_size_;
};

}  // namespace torchext
