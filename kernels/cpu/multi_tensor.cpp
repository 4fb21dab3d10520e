// CPU kernels of multi_tensor_flatten and multi_tensor_average_: the buffer is cut into equal ranges, one a thread.
#include <cstring>

#include <ATen/Parallel.h>
#include <torch/library.h>

#include "kernels/cpu/buffer_ranges.h"
#include "kernels/cpu/scale.h"
#include "kernels/multi_tensor.h"

namespace torchext::kernels {

namespace {

// Elements below which another thread costs more than it copies: 256 Ki elements are 0.5 to 2 MiB. at::parallel_for
// stays on the calling thread for less, and inside a parallel region.
constexpr std::int64_t kGrain = std::int64_t{1} << 18;

void flattenCpu(at::TensorList tensors, const at::Tensor& flat) {
  const auto offsets = checkedOffsets("multi_tensor_flatten", tensors, flat, at::kCPU, Direction::kIntoFlat);
  const auto size = static_cast<std::int64_t>(flat.element_size());
  auto* to = static_cast<char*>(flat.mutable_data_ptr());
  at::parallel_for(0, flat.numel(), kGrain, [&](std::int64_t begin, std::int64_t end) {
    cpu::forEachPiece(offsets, begin, end, [&](const cpu::Piece& piece) {
      const auto* from = static_cast<const char*>(tensors[piece.tensor].const_data_ptr());
      std::memcpy(to + piece.flat_begin * size, from + piece.tensor_begin * size,
                  static_cast<std::size_t>(piece.count * size));
    });
  });
}

template <class T>
void averageTyped(at::TensorList tensors, const at::Tensor& flat, double scale, std::span<const std::int64_t> offsets) {
  const auto* from = flat.const_data_ptr<T>();
  const auto factor = static_cast<typename cpu::Element<T>::Math>(scale);
  at::parallel_for(0, flat.numel(), kGrain, [&](std::int64_t begin, std::int64_t end) {
    cpu::forEachPiece(offsets, begin, end, [&](const cpu::Piece& piece) {
      auto* to = tensors[piece.tensor].mutable_data_ptr<T>() + piece.tensor_begin;
      cpu::scaleInto(to, from + piece.flat_begin, static_cast<std::size_t>(piece.count), factor);
    });
  });
}

void averageCpu(at::TensorList tensors, const at::Tensor& flat, double scale) {
  const auto offsets = checkedOffsets("multi_tensor_average_", tensors, flat, at::kCPU, Direction::kIntoTensors);
  switch (flat.scalar_type()) {
    case at::kDouble:
      return averageTyped<double>(tensors, flat, scale, offsets);
    case at::kHalf:
      return averageTyped<c10::Half>(tensors, flat, scale, offsets);
    case at::kBFloat16:
      return averageTyped<c10::BFloat16>(tensors, flat, scale, offsets);
    default:  // checkedOffsets lets nothing else through
      return averageTyped<float>(tensors, flat, scale, offsets);
  }
}

}  // namespace

}  // namespace torchext::kernels

TORCH_LIBRARY_IMPL(torchext, CPU, m) {
  m.impl("multi_tensor_flatten", torchext::kernels::flattenCpu);
  m.impl("multi_tensor_average_", torchext::kernels::averageCpu);
}
