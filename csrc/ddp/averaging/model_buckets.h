// ModelBuckets holds the buckets of a model's parameters and of its buffers as one list, parameters first.
//
// Threads: as FlatBuckets. The owner serializes work on one bucket; different buckets are independent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/ATen.h>

#include "ddp/common/flat_buckets.h"

namespace torchext {

class ModelBuckets {
 public:
  ModelBuckets(const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& buffers,
               std::size_t bucket_bytes);

  std::size_t size() const { return parameters_.size() + buffers_.size(); }
  const FlatBucket& operator[](std::size_t index) const {
    return index < parameters_.size() ? parameters_[index] : buffers_[index - parameters_.size()];
  }
  bool ofBuffers(std::size_t index) const { return index >= parameters_.size(); }
  const FlatBuckets& parameters() const { return parameters_; }
  const FlatBuckets& buffers() const { return buffers_; }
  // The bucket of each tensor, parameters then buffers.
  std::vector<std::int64_t> bucketOf() const;
  // What travels.
  const std::vector<at::Tensor>& transferBuffers() const { return transfer_buffers_; }

  std::size_t bytes() const { return parameters_.bytes() + buffers_.bytes(); }
  bool onCpu() const { return parameters_.onCpu() && buffers_.onCpu(); }
  void synchronizeDevices() const;

 private:
  FlatBuckets parameters_;
  FlatBuckets buffers_;
  const std::vector<at::Tensor> transfer_buffers_;  // of both
};

// of(position, begin, count): of each tensor, where it stands in the bucket.
template <class Of>
void eachTensor(const FlatBucket& bucket, Of of) {
  std::int64_t begin = 0;
  for (std::size_t i = 0; i < bucket.tensors.size(); ++i) {
    of(bucket.positions[i], begin, bucket.tensors[i].numel());
    begin += bucket.tensors[i].numel();
  }
}

// Where `holds`, elementwise over the bucket, is true of all of a tensor.
at::Tensor ofWholeTensors(const FlatBucket& bucket, const at::Tensor& holds);

}  // namespace torchext
