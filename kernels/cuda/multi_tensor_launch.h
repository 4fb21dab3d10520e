// The CUDA side of multi_tensor_flatten and multi_tensor_average_: raw pointers and a stream, no torch.
//
// Both return once the work is queued on the stream; the memory must stay alive until it has run. The list is cut into
// chunks of kChunk elements, a thread block each, and as many chunks go into one launch as its argument block holds: a
// model of hundreds of tensors takes a handful of launches, and no table is copied to the device.
//
// A call leaves an error of the launch in the returned code; errors of running show up where CUDA shows them.
#pragma once

#include <cstdint>
#include <span>

#include <cuda_runtime_api.h>

namespace torchext::cuda {

enum class ElementType { kFloat32, kFloat64, kFloat16, kBFloat16 };

// One tensor, dense in memory, and where it starts in the flat buffer. Empty ones are skipped.
struct Segment {
  void* data = nullptr;
  std::int64_t flat_begin = 0;  // elements
  std::int64_t count = 0;       // elements
};

// flat[flat_begin + i] = data[i]
cudaError_t launchFlatten(std::span<const Segment> segments, void* flat, ElementType type, cudaStream_t stream);

// data[i] = scale * flat[flat_begin + i]; 16-bit types are multiplied in float and rounded once.
cudaError_t launchAverage(std::span<const Segment> segments, const void* flat, ElementType type, double scale,
                          cudaStream_t stream);

}  // namespace torchext::cuda
