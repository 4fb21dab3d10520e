#include "ddp/dear/shard_buckets.h"

#include <algorithm>
#include <map>
#include <utility>

#include "core/base/check.h"
#include "core/dear/bucket_ends.h"
#include "core/dear/bucket_plan.h"
#include "ddp/dear/slice_copier.h"

namespace torchext {
namespace {

bool dividedFirst(const at::Tensor& buffer) { return buffer.scalar_type() == at::kHalf; }

// By element type.
std::map<int, std::vector<int>> endsOf(const std::vector<at::Tensor>& parameters,
                                       const std::vector<std::int64_t>& order, const std::vector<int>& ends) {
  std::vector<int> kinds;
  kinds.reserve(order.size());
  for (const std::int64_t tensor : order) {
    kinds.push_back(static_cast<int>(parameters.at(core::index(tensor)).scalar_type()));
  }
  return core::endsByKind(kinds, ends);
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
                           std::size_t limit_bytes, const std::vector<int>& ends, int rank, int world_size)
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
  std::map<int, std::vector<int>> explicit_ends;
  if (!ends.empty()) {
    explicit_ends = endsOf(parameters_, order, ends);
  }
  for (const auto& [dtype, tensors] : kinds) {
    std::vector<std::size_t> bytes;
    for (const std::int64_t tensor : tensors) {
      bytes.push_back(parameters_[static_cast<std::size_t>(tensor)].nbytes());
    }
    const core::BucketPlan plan =
        ends.empty() ? core::BucketPlan(std::move(bytes), limit_bytes)
                     : core::BucketPlan::fromEnds(std::move(bytes), explicit_ends.at(static_cast<int>(dtype)));
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
    std::vector<char> marked(tensors.size(), 0);
    buckets_.push_back({std::move(tensors), std::move(layout), std::move(buffer), at::ones({1}, like.options()), bytes,
                        std::move(marked)});
  }
}

void ShardBuckets::checkEnds(const std::vector<at::Tensor>& parameters, const std::vector<std::int64_t>& order,
                             const std::vector<int>& ends) {
  endsOf(parameters, order, ends);
}

bool ShardBuckets::follow(std::size_t tensor, const at::Tensor& moved) {
  at::Tensor& kept = parameters_[tensor];
  if (moved.sizes() != kept.sizes() || moved.strides() != kept.strides() || moved.dtype() != kept.dtype() ||
      moved.device() != kept.device()) {
    return false;
  }
  kept = moved.detach();
  return true;
}

std::size_t ShardBuckets::stagingBytes() const {
  std::size_t total = 0;
  for (const Bucket& bucket : buckets_) {
    total += bucket.buffer.nbytes();
  }
  return total;
}

void ShardBuckets::packGradients(std::size_t bucket, const std::vector<at::Tensor>& gradients) {
  const Bucket& chosen = buckets_[bucket];
  SliceCopier copier(chosen.buffer);
  for (std::size_t i = 0; i < chosen.tensors.size(); ++i) {
    const int place = static_cast<int>(i);
    at::Tensor source = gradients[i];
    if (source.defined()) {
      const at::Tensor& parameter = parameters_[core::index(chosen.tensors[i])];
      if (!sameMemoryOrder(source, parameter)) {
        source = at::empty_like(parameter).copy_(source);
      }
    }
    for (int rank = 0; rank < world_size_; ++rank) {
      const core::Span slice = chosen.layout.slice(place, rank);
      const std::size_t target = chosen.layout.position(place, rank);
      const std::size_t mark = chosen.layout.markPosition(place, rank);
      if (source.defined()) {
        copier.copy(chosen.buffer, target, source, slice.begin, slice.count);
        copier.copy(chosen.buffer, mark, chosen.one, 0, 1);
      } else {
        copier.zero(chosen.buffer, target, slice.count);
        copier.zero(chosen.buffer, mark, 1);
      }
    }
  }
  copier.flush();
  if (dividedFirst(chosen.buffer)) {
    chosen.buffer.mul_(1.0 / world_size_);  // the marks as well, which are no zeros either way
  }
}

double ShardBuckets::meanScale(std::size_t bucket) const {
  return dividedFirst(buckets_[bucket].buffer) ? 1.0 : 1.0 / world_size_;
}

void ShardBuckets::readMarks(std::size_t bucket) {
  Bucket& chosen = buckets_[bucket];
  const auto count = static_cast<std::int64_t>(chosen.tensors.size());
  const auto first = static_cast<std::int64_t>(chosen.layout.markPosition(0, rank_));
  const at::Tensor sums = chosen.buffer.narrow(0, first, count).cpu();
  const auto* bytes = static_cast<const std::byte*>(sums.const_data_ptr());
  const std::size_t size = sums.element_size();
  for (std::size_t i = 0; i < chosen.tensors.size(); ++i) {
    // A sum of zeros is all bits zero.
    const bool any =
        std::any_of(bytes + i * size, bytes + (i + 1) * size, [](std::byte b) { return b != std::byte{0}; });
    chosen.marked[i] = any ? 1 : 0;
  }
}

bool ShardBuckets::hasGradient(std::size_t tensor) const {
  const Place& place = place_[tensor];
  return buckets_[place.bucket].marked[core::index(place.index)] != 0;
}

at::Tensor ShardBuckets::gradient(std::size_t tensor) const {
  const Bucket& bucket = buckets_[place_[tensor].bucket];
  const int place = place_[tensor].index;
  return bucket.buffer.narrow(0, static_cast<std::int64_t>(bucket.layout.position(place, rank_)),
                              static_cast<std::int64_t>(bucket.layout.slice(place, rank_).count));
}

void ShardBuckets::unpackGradients(std::size_t bucket, const std::vector<at::Tensor>& targets) const {
  const Bucket& chosen = buckets_[bucket];
  SliceCopier copier(chosen.buffer);
  for (std::size_t i = 0; i < targets.size(); ++i) {
    for (int rank = 0; targets[i].defined() && rank < world_size_; ++rank) {
      const core::Span slice = chosen.layout.slice(static_cast<int>(i), rank);
      copier.copy(targets[i], slice.begin, chosen.buffer, chosen.layout.position(static_cast<int>(i), rank),
                  slice.count);
    }
  }
  copier.flush();
}

void ShardBuckets::packParameters(std::size_t bucket) {
  const Bucket& chosen = buckets_[bucket];
  SliceCopier copier(chosen.buffer);
  for (std::size_t i = 0; i < chosen.tensors.size(); ++i) {
    const core::Span slice = chosen.layout.slice(static_cast<int>(i), rank_);
    copier.copy(chosen.buffer, chosen.layout.position(static_cast<int>(i), rank_),
                parameters_[core::index(chosen.tensors[i])], slice.begin, slice.count);
  }
  copier.flush();
}

void ShardBuckets::unpackParameters(std::size_t bucket) {
  const Bucket& chosen = buckets_[bucket];
  SliceCopier copier(chosen.buffer);
  for (std::size_t i = 0; i < chosen.tensors.size(); ++i) {
    const at::Tensor& parameter = parameters_[core::index(chosen.tensors[i])];
    for (int rank = 0; rank < world_size_; ++rank) {
      const core::Span slice = chosen.layout.slice(static_cast<int>(i), rank);
      if (rank != rank_) {
        copier.copy(parameter, slice.begin, chosen.buffer, chosen.layout.position(static_cast<int>(i), rank),
                    slice.count);
      }
    }
  }
  copier.flush();
  for (const std::int64_t tensor : chosen.tensors) {
    // Autograd must notice a graph that has saved the old values.
    parameters_[core::index(tensor)].unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace torchext
