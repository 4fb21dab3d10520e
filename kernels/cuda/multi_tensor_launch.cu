#include "kernels/cuda/multi_tensor_launch.h"

#include <cstdint>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace torchext::cuda {

namespace {

constexpr int kThreads = 512;
constexpr std::int64_t kChunk = 32768;  // elements a block; a multiple of every vector width below
constexpr int kTensors = 80;  // segments and blocks of one launch: chosen to fit the 4 KiB of kernel arguments
constexpr int kBlocks = 320;
constexpr int kVectorBytes = 16;

struct LaunchTable {
  void* data[kTensors];
  std::int64_t flat_begin[kTensors];
  std::int64_t count[kTensors];
  std::int32_t block_chunk[kBlocks];
  std::uint8_t block_tensor[kBlocks];
};
static_assert(sizeof(LaunchTable) <= 4000, "the argument block of a kernel is 4 KiB, other arguments included");
static_assert(kTensors <= 256, "block_tensor is a byte");

// By name, because torch's build flags switch the implicit conversions of the 16-bit types off.
__device__ inline float toMath(float value) { return value; }
__device__ inline double toMath(double value) { return value; }
__device__ inline float toMath(__half value) { return __half2float(value); }
__device__ inline float toMath(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ inline void store(float& to, float value) { to = value; }
__device__ inline void store(double& to, double value) { to = value; }
__device__ inline void store(__half& to, float value) { to = __float2half_rn(value); }
__device__ inline void store(__nv_bfloat16& to, float value) { to = __float2bfloat16_rn(value); }

template <class T>
using Math = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <class T>
struct alignas(kVectorBytes) Vector {
  static constexpr int kWidth = kVectorBytes / static_cast<int>(sizeof(T));
  T value[kWidth];
};

template <class T>
struct Copy {
  __device__ T operator()(T value) const { return value; }
};

template <class T>
struct Scale {
  Math<T> factor;
  __device__ T operator()(T value) const {
    T result;
    store(result, toMath(value) * factor);
    return result;
  }
};

__device__ inline bool aligned(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) % kVectorBytes == 0;
}

// to[i] = apply(from[i]) for one chunk. Segments start anywhere in the buffer, so vectors are used where both sides
// happen to be aligned.
template <class T, class Apply>
__device__ void runChunk(T* to, const T* from, std::int64_t count, Apply apply) {
  std::int64_t done = 0;
  if (aligned(to) && aligned(from)) {
    using V = Vector<T>;
    const std::int64_t vectors = count / V::kWidth;
    for (std::int64_t i = threadIdx.x; i < vectors; i += kThreads) {
      V item = reinterpret_cast<const V*>(from)[i];
#pragma unroll
      for (int k = 0; k < V::kWidth; ++k) {
        item.value[k] = apply(item.value[k]);
      }
      reinterpret_cast<V*>(to)[i] = item;
    }
    done = vectors * V::kWidth;
  }
  for (std::int64_t i = done + threadIdx.x; i < count; i += kThreads) {
    to[i] = apply(from[i]);
  }
}

template <class T, class Apply, bool kIntoFlat>
__global__ void __launch_bounds__(kThreads)
    multiTensorKernel(const __grid_constant__ LaunchTable table, T* flat, Apply apply) {
  const int tensor = table.block_tensor[blockIdx.x];
  const std::int64_t begin = table.block_chunk[blockIdx.x] * kChunk;
  const std::int64_t count = ::min(kChunk, table.count[tensor] - begin);
  T* data = static_cast<T*>(table.data[tensor]) + begin;
  T* slice = flat + table.flat_begin[tensor] + begin;
  if constexpr (kIntoFlat) {
    runChunk(slice, data, count, apply);
  } else {
    runChunk(data, slice, count, apply);
  }
}

// Fills the table chunk by chunk and launches whenever it is full.
template <class T, bool kIntoFlat, class Apply>
cudaError_t launchAll(std::span<const Segment> segments, T* flat, Apply apply, cudaStream_t stream) {
  LaunchTable table{};
  int tensors = 0;
  int blocks = 0;
  const auto flush = [&] {
    if (blocks > 0) {
      multiTensorKernel<T, Apply, kIntoFlat><<<blocks, kThreads, 0, stream>>>(table, flat, apply);
    }
    tensors = 0;
    blocks = 0;
    return cudaGetLastError();
  };
  for (const Segment& segment : segments) {
    const std::int64_t chunks = (segment.count + kChunk - 1) / kChunk;
    for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
      if (chunk == 0 || tensors == 0) {  // a new segment, or this one goes on in a fresh table
        table.data[tensors] = segment.data;
        table.flat_begin[tensors] = segment.flat_begin;
        table.count[tensors] = segment.count;
        ++tensors;
      }
      table.block_tensor[blocks] = static_cast<std::uint8_t>(tensors - 1);
      table.block_chunk[blocks] = static_cast<std::int32_t>(chunk);
      ++blocks;
      const bool full = blocks == kBlocks || (tensors == kTensors && chunk + 1 == chunks);
      if (full) {
        if (const cudaError_t error = flush(); error != cudaSuccess) {
          return error;
        }
      }
    }
  }
  return flush();
}

template <class T>
cudaError_t averageTyped(std::span<const Segment> segments, const void* flat, double scale, cudaStream_t stream) {
  // The kernel only reads the buffer in this direction; one kernel serves both, hence the cast.
  auto* source = static_cast<T*>(const_cast<void*>(flat));
  return launchAll<T, false>(segments, source, Scale<T>{static_cast<Math<T>>(scale)}, stream);
}

template <class Bits>
cudaError_t flattenBits(std::span<const Segment> segments, void* flat, cudaStream_t stream) {
  return launchAll<Bits, true>(segments, static_cast<Bits*>(flat), Copy<Bits>{}, stream);
}

}  // namespace

cudaError_t launchFlatten(std::span<const Segment> segments, void* flat, ElementType type, cudaStream_t stream) {
  switch (type) {  // a copy looks at sizes only
    case ElementType::kFloat64:
      return flattenBits<std::uint64_t>(segments, flat, stream);
    case ElementType::kFloat32:
      return flattenBits<std::uint32_t>(segments, flat, stream);
    case ElementType::kFloat16:
    case ElementType::kBFloat16:
      return flattenBits<std::uint16_t>(segments, flat, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t launchAverage(std::span<const Segment> segments, const void* flat, ElementType type, double scale,
                          cudaStream_t stream) {
  switch (type) {
    case ElementType::kFloat64:
      return averageTyped<double>(segments, flat, scale, stream);
    case ElementType::kFloat32:
      return averageTyped<float>(segments, flat, scale, stream);
    case ElementType::kFloat16:
      return averageTyped<__half>(segments, flat, scale, stream);
    case ElementType::kBFloat16:
      return averageTyped<__nv_bfloat16>(segments, flat, scale, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace torchext::cuda
