#include "ddp/common/flat_buckets.h"

#include <algorithm>

#include <ATen/core/dispatch/Dispatcher.h>

#include "ddp/common/side_stream.h"

namespace torchext {
namespace {

// Through the dispatcher: the operators live in torchext._kernels, a library of its own, for CPU and CUDA.
void flatten(at::TensorList tensors, const at::Tensor& flat) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("torchext::multi_tensor_flatten", "")
                             .typed<void(at::TensorList, const at::Tensor&)>();
  op.call(tensors, flat);
}

void average(at::TensorList tensors, const at::Tensor& flat, double scale) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("torchext::multi_tensor_average_", "")
                             .typed<void(at::TensorList, const at::Tensor&, double)>();
  op.call(tensors, flat, scale);
}

}  // namespace

void FlatBucket::pack() const {
  synchronizeDevice(flat.device());  // training may be on a stream that this thread knows nothing of
  flatten(tensors, flat);
  if (!flat.device().is_cpu()) {
    transfer_buffer.copy_(flat);
  }
}

void FlatBucket::unpack(double scale) const {
  if (!flat.device().is_cpu()) {
    flat.copy_(transfer_buffer);
  }
  average(tensors, flat, scale);
  synchronizeDevice(flat.device());
}

FlatBuckets::FlatBuckets(const std::vector<at::Tensor>& tensors, std::size_t bucket_bytes) {
  // Open buckets by kind: models mix dtypes (a float32 norm in a bfloat16 model) without every change closing a bucket.
  struct Open {
    c10::ScalarType dtype;
    c10::Device device;
    std::size_t index;
    std::size_t bytes;
  };
  std::vector<Open> open;
  for (const at::Tensor& tensor : tensors) {
    auto it = std::find_if(open.begin(), open.end(), [&](const Open& o) {
      return o.dtype == tensor.scalar_type() && o.device == tensor.device() && o.bytes < bucket_bytes;
    });
    if (it == open.end()) {
      buckets_.emplace_back();
      it = open.insert(open.end(), Open{tensor.scalar_type(), tensor.device(), buckets_.size() - 1, 0});
    }
    buckets_[it->index].tensors.push_back(tensor.detach());
    buckets_[it->index].positions.push_back(bucket_of_.size());
    bucket_of_.push_back(static_cast<std::int64_t>(it->index));
    it->bytes += tensor.nbytes();
  }
  for (FlatBucket& bucket : buckets_) {
    std::int64_t count = 0;
    for (const at::Tensor& tensor : bucket.tensors) {
      count += tensor.numel();
    }
    bucket.flat = at::empty({count}, bucket.tensors.front().options().requires_grad(false));
    bucket.transfer_buffer = bucket.flat.device().is_cpu()
                                 ? bucket.flat
                                 : at::empty({count}, bucket.flat.options().device(at::kCPU).pinned_memory(true));
  }
}

std::size_t FlatBuckets::bytes() const {
  std::size_t total = 0;
  for (const FlatBucket& bucket : buckets_) {
    total += bucket.bytes();
  }
  return total;
}

bool FlatBuckets::onCpu() const {
  return std::all_of(buckets_.begin(), buckets_.end(),
                     [](const FlatBucket& bucket) { return bucket.flat.device().is_cpu(); });
}

void FlatBuckets::synchronizeDevices() const {
  for (std::size_t i = 0; i < buckets_.size(); ++i) {
    if (i == 0 || buckets_[i].flat.device() != buckets_[i - 1].flat.device()) {
      synchronizeDevice(buckets_[i].flat.device());
    }
  }
}

std::vector<at::Tensor> transferBuffersOf(const FlatBuckets& parameters, const FlatBuckets& buffers) {
  std::vector<at::Tensor> transfer_buffers;
  for (const FlatBuckets* buckets : {&parameters, &buffers}) {
    for (std::size_t i = 0; i < buckets->size(); ++i) {
      transfer_buffers.push_back((*buckets)[i].transfer_buffer);
    }
  }
  return transfer_buffers;
}

}  // namespace torchext
