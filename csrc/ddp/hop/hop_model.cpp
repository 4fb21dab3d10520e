#include "ddp/hop/hop_model.h"

#include <algorithm>
#include <cmath>
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

template <class T>
bool same(T left, T right) {
  return left == right || (left != left && right != right);
}

// The sum of one parameter reads the blocks at its place.
template <class T>
void sumInto(T* to, std::size_t count, std::span<const HopModel::Input> inputs, std::size_t offset) {
  using Math = typename cpu::Element<T>::Math;
  std::vector<const T*> sources;
  std::vector<Math> weights;
  for (const HopModel::Input& input : inputs) {
    sources.push_back(reinterpret_cast<const T*>(input.block + offset));
    weights.push_back(static_cast<Math>(input.weight));
  }
  cpu::weightedSum<T>(to, sources, weights, count);
}

// The sum of one tensor that has been written since it was packed, or may have been: what was added since is added to
// the sum. Buffers need not be statistics: what all blocks agree on (masks, constants) is left as it is, and where the
// sum with the addition is not a finite number, or of a buffer without negative numbers it alone is negative (a
// variance must not become so), what was written stays.
template <class T>
void carryInto(T* to, std::size_t count, std::span<const HopModel::Input> inputs, std::size_t offset,
               const std::byte* packed, bool buffer) {
  const T* const before = reinterpret_cast<const T*>(packed + offset);
  const T* const first = reinterpret_cast<const T*>(inputs.front().block + offset);
  const auto nonnegative = [count](const T* values) {
    return std::all_of(values, values + count, [](T value) { return value >= T(0); });
  };
  const bool keeps_sign = buffer && nonnegative(to) && nonnegative(before) &&
                          std::all_of(inputs.begin(), inputs.end(), [&](const HopModel::Input& input) {
                            return nonnegative(reinterpret_cast<const T*>(input.block + offset));
                          });
  for (std::size_t i = 0; i < count; ++i) {
    double sum = 0.0;
    bool agreed = true;
    for (const HopModel::Input& input : inputs) {
      const T value = reinterpret_cast<const T*>(input.block + offset)[i];
      agreed = agreed && same(value, first[i]);
      sum += input.weight * static_cast<double>(value);
    }
    sum = agreed ? static_cast<double>(first[i]) : sum;
    if (same(to[i], before[i])) {
      to[i] = static_cast<T>(sum);
    } else {
      const T moved = static_cast<T>(sum + (static_cast<double>(to[i]) - static_cast<double>(before[i])));
      const bool loses_sign = keeps_sign && static_cast<double>(moved) < 0;
      to[i] = std::isfinite(static_cast<double>(moved)) && !loses_sign ? moved : to[i];
    }
  }
}

// packed: null for a tensor that nobody has written since it was packed.
void average(const at::Tensor& to, std::span<const HopModel::Input> inputs, std::size_t offset, const std::byte* packed,
             bool buffer) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, to.scalar_type(), "hop", [&] {
    auto* const data = to.mutable_data_ptr<scalar_t>();
    const auto count = static_cast<std::size_t>(to.numel());
    if (packed == nullptr) {
      sumInto(data, count, inputs, offset);
    } else {
      carryInto(data, count, inputs, offset, packed, buffer);
    }
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
      into.flat = into.transfer_buffer = at::from_blob(block + offsets_[i], into.flat.sizes(), into.flat.options());
      into.pack();
    } else {
      part(i).pack();
      std::memcpy(block + offsets_[i], part(i).transfer_buffer.const_data_ptr(), bytes);
    }
    std::memset(block + offsets_[i] + bytes, 0, aligned(bytes) - bytes);
  }
}

void HopModel::assign(std::span<const Input> inputs, const std::byte* packed, const std::vector<Write>& writes) const {
  for (std::size_t i = 0; i < parts(); ++i) {
    const FlatBucket& to = part(i);
    const bool buffer = i >= parameters_.size();
    const bool on_cpu = to.flat.device().is_cpu();
    const auto written = [&writes](std::size_t position) { return writes[position] != Write::kNone; };
    if (!on_cpu && (buffer || std::any_of(to.positions.begin(), to.positions.end(), written))) {
      to.pack();  // what stays, or is added to
    }
    std::int64_t begin = 0;
    for (std::size_t j = 0; j < to.tensors.size(); ++j) {
      const at::Tensor tensor = on_cpu ? to.tensors[j] : to.transfer_buffer.narrow(0, begin, to.tensors[j].numel());
      const std::size_t offset = offsets_[i] + static_cast<std::size_t>(begin) * tensor.element_size();
      const Write write = buffer ? Write::kAgain : writes[to.positions[j]];
      begin += tensor.numel();
      if (write == Write::kNow) {
        continue;
      }
      average(tensor, inputs, offset, write == Write::kAgain ? packed : nullptr, buffer);
      if (!tensor.is_inference()) {
        tensor.unsafeGetTensorImpl()->bump_version();
      }
    }
    if (!on_cpu) {
      to.unpack(1.0);
    }
  }
}

}  // namespace torchext
