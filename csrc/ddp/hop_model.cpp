#include "ddp/hop_model.h"

#include <cstring>
#include <limits>

#include <ATen/Dispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "kernels/cpu/weighted_sum.h"

namespace torchext {
namespace {

std::size_t aligned(std::size_t bytes) {
  return (bytes + HopModel::kAlignment - 1) / HopModel::kAlignment * HopModel::kAlignment;
}

// What the sum of one tensor reads: the blocks at its place, and what a forward has changed since it was packed.
template <class T>
void sumInto(T* to, std::size_t count, std::span<const HopModel::Input> inputs, std::size_t offset,
             const std::byte* packed) {
  using Math = typename cpu::Element<T>::Math;
  std::vector<const T*> sources;
  std::vector<Math> weights;
  for (const HopModel::Input& input : inputs) {
    sources.push_back(reinterpret_cast<const T*>(input.block + offset));
    weights.push_back(static_cast<Math>(input.weight));
  }
  if (packed != nullptr) {
    sources.push_back(to);
    weights.push_back(Math{1});
    sources.push_back(reinterpret_cast<const T*>(packed + offset));
    weights.push_back(Math{-1});
  }
  cpu::weightedSum<T>(to, sources, weights, count);
}

void sumInto(const at::Tensor& to, std::span<const HopModel::Input> inputs, std::size_t offset,
             const std::byte* packed) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, to.scalar_type(), "hop", [&] {
    sumInto(to.mutable_data_ptr<scalar_t>(), static_cast<std::size_t>(to.numel()), inputs, offset, packed);
  });
}

}  // namespace

HopModel::HopModel(const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& buffers)
    : parameters_(parameters, std::numeric_limits<std::size_t>::max()),
      buffers_(buffers, std::numeric_limits<std::size_t>::max()) {
  for (std::size_t i = 0; i < parts(); ++i) {
    offsets_.push_back(bytes_);
    bytes_ += aligned(part(i).bytes());
  }
}

void HopModel::pack(std::byte* block) const {
  for (std::size_t i = 0; i < parts(); ++i) {
    const std::size_t bytes = part(i).bytes();
    if (part(i).flat.device().is_cpu()) {
      FlatBucket into = part(i);
      into.flat = into.wire = at::from_blob(block + offsets_[i], into.flat.sizes(), into.flat.options());
      into.pack();
    } else {
      part(i).pack();
      std::memcpy(block + offsets_[i], part(i).wire.const_data_ptr(), bytes);
    }
    std::memset(block + offsets_[i] + bytes, 0, aligned(bytes) - bytes);
  }
}

void HopModel::assign(std::span<const Input> inputs, const std::byte* packed) const {
  for (std::size_t i = 0; i < parts(); ++i) {
    const FlatBucket& to = part(i);
    const std::byte* changed = i < parameters_.size() ? nullptr : packed;
    if (!to.flat.device().is_cpu()) {
      if (changed != nullptr) {
        to.pack();  // what the sum adds to
      }
      sumInto(to.wire, inputs, offsets_[i], changed);
      to.unpack(1.0);
      continue;
    }
    std::size_t offset = offsets_[i];
    for (const at::Tensor& tensor : to.tensors) {
      sumInto(tensor, inputs, offset, changed);
      offset += tensor.nbytes();
      if (!tensor.is_inference()) {
        tensor.unsafeGetTensorImpl()->bump_version();
      }
    }
  }
}

}  // namespace torchext
