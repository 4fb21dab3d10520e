// Runs the passes of bag_run.h on a GPU: a thread for an item, or for a lane of a group.
//
// The first error of a launch is kept and later launches are left out; error() has it.
#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_runtime_api.h>
#include <cub/device/device_radix_sort.cuh>

#include "kernels/cuda/lanes.h"

namespace torchext::cuda {

// A group of neighbouring threads of one warp. Lanes of a group come to all() and first() together or not at all, other
// groups of the warp may have left: hence the mask.
class DeviceGroup {
 public:
  static constexpr int kOwn = 1;

  __device__ explicit DeviceGroup(int lanes) : lanes_(lanes), lane_(static_cast<int>(threadIdx.x) & (lanes - 1)) {
    const unsigned ones = lanes == kMostLanes ? ~0U : (1U << static_cast<unsigned>(lanes)) - 1U;
    mask_ = ones << ((threadIdx.x & (kMostLanes - 1U)) & ~static_cast<unsigned>(lanes - 1));
  }

  TORCHEXT_HD int lanes() const { return lanes_; }
  template <class Body>
  TORCHEXT_HD void each(Body&& body) const {
    body(lane_, 0);
  }
  template <class M, class Op>
  TORCHEXT_HD M all(const M* values, Op op) const {
    M now = values[0];
    for (int offset = lanes_ / 2; offset > 0; offset /= 2) {
      now = op(now, fromLane(now, lane_ ^ offset));
    }
    return now;
  }
  template <class M>
  TORCHEXT_HD M first(const M* values) const {
    return fromLane(values[0], 0);
  }

 private:
  // nvcc compiles what is called by a __host__ __device__ function for the host as well, where nobody calls it.
  template <class M>
  TORCHEXT_HD M fromLane(M value, int lane) const {
#if defined(__CUDA_ARCH__)
    return __shfl_sync(mask_, value, lane, lanes_);
#else
    return value;
#endif
  }

  int lanes_;
  int lane_;
  unsigned mask_;
};

inline constexpr int kThreads = 256;

template <class Item>
__global__ void __launch_bounds__(kThreads) itemKernel(const __grid_constant__ Item item, std::int64_t count) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < count) {
    item(i);
  }
}

template <class Item>
__global__ void __launch_bounds__(kThreads)
    groupKernel(const __grid_constant__ Item item, std::int64_t count, int lanes) {
  const std::int64_t i = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) / lanes;
  if (i < count) {
    item(DeviceGroup(lanes), i);
  }
}

class CudaDevice {
 public:
  explicit CudaDevice(cudaStream_t stream) : stream_(stream) {}

  template <class Item>
  void forEach(std::int64_t count, const Item& item) {
    if (const unsigned blocks = blocksFor(count); blocks > 0) {
      itemKernel<<<blocks, kThreads, 0, stream_>>>(item, count);
      error_ = cudaGetLastError();
    }
  }
  template <class Item>
  void forEachGroup(std::int64_t count, int lanes, const Item& item) {
    if (const unsigned blocks = blocksFor(count * lanes); blocks > 0) {
      groupKernel<<<blocks, kThreads, 0, stream_>>>(item, count, lanes);
      error_ = cudaGetLastError();
    }
  }
  // A template, so that only who sorts compiles it.
  template <class Key, class Position>
  void sort(const Key* keys, Key* sorted, const Position* positions, Position* order, std::int64_t count, int bits,
            void* memory, std::size_t bytes) {
    if (count > 0 && error_ == cudaSuccess) {
      error_ = cub::DeviceRadixSort::SortPairs(memory, bytes, keys, sorted, positions, order, static_cast<int>(count),
                                               0, bits, stream_);
    }
  }

  cudaError_t error() const { return error_; }

 private:
  // 0 where there is nothing to do, or nothing to be done any more.
  unsigned blocksFor(std::int64_t threads) {
    constexpr std::int64_t kMostBlocks = (std::int64_t{1} << 31) - 1;
    const std::int64_t blocks = (threads + kThreads - 1) / kThreads;
    if (error_ == cudaSuccess && blocks > kMostBlocks) {
      error_ = cudaErrorInvalidConfiguration;
    }
    return error_ == cudaSuccess ? static_cast<unsigned>(blocks) : 0;
  }

  cudaStream_t stream_;
  cudaError_t error_ = cudaSuccess;
};

}  // namespace torchext::cuda
