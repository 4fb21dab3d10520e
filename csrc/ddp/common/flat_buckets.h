// FlatBuckets: a model's tensors as a few flat, contiguous buffers - what is averaged.
//
// Tensors are taken in the order given (registration order, which is close to forward order), a bucket holding tensors
// of one dtype and device up to a size. The flat buffers are the one extra copy of the parameters that decentralized
// training needs. For CUDA tensors a bucket has a second, host-side buffer, which is what travels.
//
// Threads: the owner serializes pack and unpack of a bucket; different buckets are independent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/ATen.h>

namespace torchext {

struct FlatBucket {
  std::vector<at::Tensor> tensors;     // aliases of the model's tensors, detached
  std::vector<std::size_t> positions;  // theirs in the list that the buckets were made of
  at::Tensor flat;                     // 1-D, on the tensors' device
  at::Tensor transfer_buffer;          // 1-D, on the CPU: `flat` itself for CPU tensors, pinned memory for CUDA

  void pack() const;                // tensors -> transfer_buffer
  void unpack(double scale) const;  // scale * transfer_buffer -> tensors, fused (torchext::multi_tensor_average_)
  std::size_t bytes() const { return flat.nbytes(); }
};

class FlatBuckets {
 public:
  // tensors: dense, of any mix of dtypes and devices. bucket_bytes: a bucket closes once it holds this many.
  FlatBuckets(const std::vector<at::Tensor>& tensors, std::size_t bucket_bytes);

  std::size_t size() const { return buckets_.size(); }
  const FlatBucket& operator[](std::size_t index) const { return buckets_[index]; }
  // The bucket that holds tensors[i] of the constructor.
  const std::vector<std::int64_t>& bucketOf() const { return bucket_of_; }
  std::size_t bytes() const;
  // Whether all are on the CPU, where work is done when it returns.
  bool onCpu() const;
  // Blocks the calling thread until their devices have done all that was queued on them.
  void synchronizeDevices() const;

 private:
  std::vector<FlatBucket> buckets_;
  std::vector<std::int64_t> bucket_of_;
};

// What travels of a model.
std::vector<at::Tensor> transferBuffersOf(const FlatBuckets& parameters, const FlatBuckets& buffers);

}  // namespace torchext
