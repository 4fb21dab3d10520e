#include "ddp/averaging/model_buckets.h"

namespace torchext {

ModelBuckets::ModelBuckets(const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& buffers,
                           std::size_t bucket_bytes)
    : parameters_(parameters, bucket_bytes),
      buffers_(buffers, bucket_bytes),
      transfer_buffers_(transferBuffersOf(parameters_, buffers_)) {}

std::vector<std::int64_t> ModelBuckets::bucketOf() const {
  std::vector<std::int64_t> bucket_of = parameters_.bucketOf();
  for (const std::int64_t index : buffers_.bucketOf()) {
    bucket_of.push_back(static_cast<std::int64_t>(parameters_.size()) + index);
  }
  return bucket_of;
}

void ModelBuckets::synchronizeDevices() const {
  parameters_.synchronizeDevices();
  buffers_.synchronizeDevices();
}

at::Tensor ofWholeTensors(const FlatBucket& bucket, const at::Tensor& holds) {
  at::Tensor result = at::empty_like(holds);
  eachTensor(bucket, [&](std::size_t /*position*/, std::int64_t begin, std::int64_t count) {
    const at::Tensor part = result.narrow(0, begin, count);
    part.copy_(holds.narrow(0, begin, count).all().expand_as(part));
  });
  return result;
}

}  // namespace torchext
