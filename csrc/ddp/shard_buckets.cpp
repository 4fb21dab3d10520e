#include "ddp/shard_buckets.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include <c10/util/Exception.h>

#include "core/bucket_plan.h"

namespace torchext {
namespace {

std::byte* bytesAt(const at::Tensor& tensor, std::size_t element) {
  return static_cast<std::byte*>(tensor.data_ptr()) + element * tensor.element_size();
}

}  // namespace

bool sameMemoryOrder(const at::Tensor& gradient, const at::Tensor& parameter) {
  return gradient.scalar_type() == parameter.scalar_type() &&
         (gradient.strides() == parameter.strides() || (gradient.is_contiguous() && parameter.is_contiguous()));
}

at::Tensor ownSlice(const at::Tensor& tensor, int world_size, int rank) {
  const core::Span own = core::sliceOf(static_cast<std::size_t>(tensor.numel()), world_size, rank);
  return tensor.detach()
      .as_strided({tensor.numel()}, {1})
      .narrow(0, static_cast<std::int64_t>(own.begin), static_cast<std::int64_t>(own.count));
}

ShardBuckets::ShardBuckets(const std::vector<at::Tensor>& parameters, const std::vector<std::int64_t>& order,
                           std::size_t limit_bytes, int rank, int world_size)
    : place_(parameters.size()), rank_(rank), world_size_(world_size) {
  for (const at::Tensor& parameter : parameters) {
    parameters_.push_back(parameter.detach());
  }
  // A plan for each element type; then all buckets in the order in which their last gradient comes.
  std::map<c10::ScalarType, std::vector<std::int64_t>> kinds;
  for (const std::int64_t tensor : order) {
    kinds[parameters_.at(static_cast<std::size_t>(tensor)).scalar_type()].push_back(tensor);
  }
  std::map<std::int64_t, std::vector<std::int64_t>> by_last;  // place in `order` of the last tensor -> tensors
  std::vector<std::int64_t> when(parameters.size(), 0);
  for (std::size_t i = 0; i < order.size(); ++i) {
    when[static_cast<std::size_t>(order[i])] = static_cast<std::int64_t>(i);
  }
  for (const auto& [dtype, tensors] : kinds) {
    std::vector<std::size_t> bytes;
    for (const std::int64_t tensor : tensors) {
      bytes.push_back(parameters_[static_cast<std::size_t>(tensor)].nbytes());
    }
    const core::BucketPlan plan(std::move(bytes), limit_bytes);
    for (int b = 0; b < plan.bucketCount(); ++b) {
      const auto first = tensors.begin() + plan.bucket(b).first;
      const std::vector<std::int64_t> members(first, first + plan.bucket(b).count);
      by_last[when[static_cast<std::size_t>(members.back())]] = members;
    }
  }
  for (auto& [last, tensors] : by_last) {
    std::vector<std::size_t> elements;
    std::size_t bytes = 0;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const auto tensor = static_cast<std::size_t>(tensors[i]);
      place_[tensor] = {buckets_.size(), static_cast<int>(i)};
      elements.push_back(static_cast<std::size_t>(parameters_[tensor].numel()));
      bytes += parameters_[tensor].nbytes();
    }
    const at::Tensor& like = parameters_[static_cast<std::size_t>(tensors.front())];
    core::ShardLayout layout(std::move(elements), like.element_size(), world_size);
    // Zeros: the padding travels, too.
    at::Tensor buffer = at::zeros({static_cast<std::int64_t>(layout.bufferElements())}, like.options());
    buckets_.push_back(
        {std::move(tensors), std::move(layout), std::move(buffer), at::ones({1}, like.options()), bytes});
  }
}

std::size_t ShardBuckets::stagingBytes() const {
  std::size_t total = 0;
  for (const Bucket& bucket : buckets_) {
    total += bucket.buffer.nbytes();
  }
  return total;
}

void ShardBuckets::packGradient(std::size_t tensor, const at::Tensor& gradient) {
  const Bucket& bucket = buckets_[place_[tensor].bucket];
  const int index = place_[tensor].index;
  const std::size_t size = bucket.buffer.element_size();
  at::Tensor source;
  if (gradient.defined()) {
    TORCH_CHECK_TYPE(gradient.layout() == at::kStrided, "dear: parameter ", tensor,
                     " (in order of registration) has a ", gradient.layout(),
                     " gradient; make it dense (nn.Embedding(sparse=False))");
    const at::Tensor& parameter = parameters_[tensor];
    source = sameMemoryOrder(gradient, parameter) ? gradient : at::empty_like(parameter).copy_(gradient);
  }
  const std::byte* mark = source.defined() ? bytesAt(bucket.one, 0) : nullptr;
  for (int rank = 0; rank < world_size_; ++rank) {
    const core::Span slice = bucket.layout.slice(index, rank);
    std::byte* target = bytesAt(bucket.buffer, bucket.layout.position(index, rank));
    if (slice.count == 0) {
      // nothing of it is that rank's
    } else if (source.defined()) {
      std::memcpy(target, bytesAt(source, slice.begin), slice.count * size);
    } else {
      std::memset(target, 0, slice.count * size);
    }
    std::byte* marked = bytesAt(bucket.buffer, bucket.layout.markPosition(index, rank));
    if (mark != nullptr) {
      std::memcpy(marked, mark, size);
    } else {
      std::memset(marked, 0, size);
    }
  }
}

bool ShardBuckets::hasGradient(std::size_t tensor) const {
  const Bucket& bucket = buckets_[place_[tensor].bucket];
  const std::byte* mark = bytesAt(bucket.buffer, bucket.layout.markPosition(place_[tensor].index, rank_));
  // A sum of zeros is all bits zero.
  return std::any_of(mark, mark + bucket.buffer.element_size(), [](std::byte byte) { return byte != std::byte{0}; });
}

at::Tensor ShardBuckets::gradient(std::size_t tensor) const {
  const Bucket& bucket = buckets_[place_[tensor].bucket];
  const int index = place_[tensor].index;
  return bucket.buffer.narrow(0, static_cast<std::int64_t>(bucket.layout.position(index, rank_)),
                              static_cast<std::int64_t>(bucket.layout.slice(index, rank_).count));
}

void ShardBuckets::unpackGradient(std::size_t tensor, const at::Tensor& target) const {
  const Bucket& bucket = buckets_[place_[tensor].bucket];
  const int index = place_[tensor].index;
  const std::size_t size = bucket.buffer.element_size();
  for (int rank = 0; rank < world_size_; ++rank) {
    const core::Span slice = bucket.layout.slice(index, rank);
    if (slice.count > 0) {
      std::memcpy(bytesAt(target, slice.begin), bytesAt(bucket.buffer, bucket.layout.position(index, rank)),
                  slice.count * size);
    }
  }
}

void ShardBuckets::packParameters(std::size_t bucket) {
  const Bucket& chosen = buckets_[bucket];
  const std::size_t size = chosen.buffer.element_size();
  for (std::size_t i = 0; i < chosen.tensors.size(); ++i) {
    const at::Tensor& parameter = parameters_[static_cast<std::size_t>(chosen.tensors[i])];
    const core::Span slice = chosen.layout.slice(static_cast<int>(i), rank_);
    if (slice.count > 0) {
      std::memcpy(bytesAt(chosen.buffer, chosen.layout.position(static_cast<int>(i), rank_)),
                  bytesAt(parameter, slice.begin), slice.count * size);
    }
  }
}

void ShardBuckets::unpackParameters(std::size_t bucket) {
  const Bucket& chosen = buckets_[bucket];
  const std::size_t size = chosen.buffer.element_size();
  for (std::size_t i = 0; i < chosen.tensors.size(); ++i) {
    const at::Tensor& parameter = parameters_[static_cast<std::size_t>(chosen.tensors[i])];
    for (int rank = 0; rank < world_size_; ++rank) {
      const core::Span slice = chosen.layout.slice(static_cast<int>(i), rank);
      if (rank != rank_ && slice.count > 0) {
        std::memcpy(bytesAt(parameter, slice.begin),
                    bytesAt(chosen.buffer, chosen.layout.position(static_cast<int>(i), rank)), slice.count * size);
      }
    }
    // Autograd must notice a graph that has saved the old values.
    parameter.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace torchext
