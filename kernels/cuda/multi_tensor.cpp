// CUDA kernels of multi_tensor_flatten and multi_tensor_average_: from tensors to raw pointers on the current stream.
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "kernels/cuda/multi_tensor_launch.h"
#include "kernels/multi_tensor.h"

namespace torchext::kernels {

namespace {

cuda::ElementType elementType(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return cuda::ElementType::kFloat64;
    case at::kHalf:
      return cuda::ElementType::kFloat16;
    case at::kBFloat16:
      return cuda::ElementType::kBFloat16;
    default:  // checkedOffsets lets nothing else through
      return cuda::ElementType::kFloat32;
  }
}

void* dataOf(const at::Tensor& tensor, Direction direction) {
  // Read-only access keeps copy-on-write tensors shared.
  return direction == Direction::kIntoTensors ? tensor.mutable_data_ptr() : const_cast<void*>(tensor.const_data_ptr());
}

std::vector<cuda::Segment> segmentsOf(const char* op, at::TensorList tensors, const at::Tensor& flat,
                                      Direction direction) {
  const auto offsets = checkedOffsets(op, tensors, flat, at::kCUDA, direction);
  std::vector<cuda::Segment> segments;
  segments.reserve(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    segments.push_back({dataOf(tensors[i], direction), offsets[i], offsets[i + 1] - offsets[i]});
  }
  return segments;
}

void flattenCuda(at::TensorList tensors, const at::Tensor& flat) {
  const auto segments = segmentsOf("multi_tensor_flatten", tensors, flat, Direction::kIntoFlat);
  const c10::cuda::CUDAGuard guard(flat.device());
  C10_CUDA_CHECK(cuda::launchFlatten(segments, flat.mutable_data_ptr(), elementType(flat.scalar_type()),
                                     c10::cuda::getCurrentCUDAStream()));
}

void averageCuda(at::TensorList tensors, const at::Tensor& flat, double scale) {
  const auto segments = segmentsOf("multi_tensor_average_", tensors, flat, Direction::kIntoTensors);
  const c10::cuda::CUDAGuard guard(flat.device());
  C10_CUDA_CHECK(cuda::launchAverage(segments, flat.const_data_ptr(), elementType(flat.scalar_type()), scale,
                                     c10::cuda::getCurrentCUDAStream()));
}

}  // namespace

}  // namespace torchext::kernels

TORCH_LIBRARY_IMPL(torchext, CUDA, m) {
  m.impl("multi_tensor_flatten", torchext::kernels::flattenCuda);
  m.impl("multi_tensor_average_", torchext::kernels::averageCuda);
}
