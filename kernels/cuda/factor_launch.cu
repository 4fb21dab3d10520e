#include "kernels/cuda/factor_launch.h"

#include "kernels/triangle.h"

namespace torchext::cuda {

namespace {

constexpr int kPackThreads = 128;
constexpr int kAppendThreads = 256;
constexpr std::int64_t kMostAppendBlocks = 4096;
constexpr int kLines = 8;                // rows of a tile that a block of kTile x kLines threads takes at once
constexpr unsigned kMostGroups = 65535;  // of a grid's second dimension; blocks go on from there

template <class T>
__global__ void __launch_bounds__(kPackThreads)
    packKernel(const T* full, std::int64_t stride, std::int64_t groups, std::int64_t dim, bool add, T* packed) {
  for (std::int64_t group = blockIdx.y; group < groups; group += gridDim.y) {
    triangle::packRow(full + group * stride * stride, stride, dim, blockIdx.x, add, threadIdx.x, kPackThreads,
                      packed + group * triangle::packedSize(dim));
  }
}

template <class T>
__global__ void __launch_bounds__(kAppendThreads)
    appendKernel(const padded_samples::Strided<T> from, std::int64_t group_stride, bool ones_in_rows, std::int64_t rows,
                 std::int64_t columns, std::int64_t count, T* to) {
  const std::int64_t step = std::int64_t{gridDim.x} * kAppendThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kAppendThreads + threadIdx.x; i < count; i += step) {
    const std::int64_t row = i / columns;
    const std::int64_t group = row / rows;
    padded_samples::Strided<T> of_group = from;
    of_group.data += group * group_stride;
    to[i] = padded_samples::appended(of_group, ones_in_rows, row - group * rows, i - row * columns);
  }
}

template <class T>
__global__ void __launch_bounds__(triangle::kTile* kLines)
    unpackKernel(const T* packed, std::int64_t groups, std::int64_t dim, T* full) {
  __shared__ T buffer[triangle::kTile * (triangle::kTile + 1)];
  const triangle::Tile tile = triangle::tileAt(blockIdx.x, dim);
  for (std::int64_t group = blockIdx.y; group < groups; group += gridDim.y) {
    triangle::loadTile(packed + group * triangle::packedSize(dim), dim, tile, threadIdx.x, threadIdx.y, kLines, buffer);
    __syncthreads();
    triangle::storeTile(buffer, dim, tile, threadIdx.x, threadIdx.y, kLines, full + group * dim * dim);
    __syncthreads();  // the next group overwrites the buffer
  }
}

unsigned groupBlocks(std::int64_t groups) { return groups < kMostGroups ? static_cast<unsigned>(groups) : kMostGroups; }

}  // namespace

template <class T>
cudaError_t launchPack(const T* full, std::int64_t stride, std::int64_t groups, std::int64_t dim, bool add, T* packed,
                       cudaStream_t stream) {
  if (groups == 0 || dim == 0) {
    return cudaSuccess;
  }
  const dim3 blocks(static_cast<unsigned>(dim), groupBlocks(groups));
  packKernel<<<blocks, kPackThreads, 0, stream>>>(full, stride, groups, dim, add, packed);
  return cudaGetLastError();
}

template <class T>
cudaError_t launchUnpack(const T* packed, std::int64_t groups, std::int64_t dim, T* full, cudaStream_t stream) {
  if (groups == 0 || dim == 0) {
    return cudaSuccess;
  }
  const dim3 blocks(static_cast<unsigned>(triangle::tilesOf(dim)), groupBlocks(groups));
  const dim3 threads(triangle::kTile, kLines);
  unpackKernel<<<blocks, threads, 0, stream>>>(packed, groups, dim, full);
  return cudaGetLastError();
}

template <class T>
cudaError_t launchAppend(const padded_samples::Strided<T>& from, std::int64_t group_stride, bool ones_in_rows,
                         std::int64_t groups, std::int64_t rows, std::int64_t columns, T* to, cudaStream_t stream) {
  const std::int64_t count = groups * rows * columns;
  if (count == 0) {
    return cudaSuccess;
  }
  const std::int64_t blocks = (count + kAppendThreads - 1) / kAppendThreads;
  appendKernel<<<static_cast<unsigned>(blocks < kMostAppendBlocks ? blocks : kMostAppendBlocks), kAppendThreads, 0,
                 stream>>>(from, group_stride, ones_in_rows, rows, columns, count, to);
  return cudaGetLastError();
}

#define TORCHEXT_INSTANTIATE(T)                                                                                   \
  template cudaError_t launchPack<T>(const T*, std::int64_t, std::int64_t, std::int64_t, bool, T*, cudaStream_t); \
  template cudaError_t launchUnpack<T>(const T*, std::int64_t, std::int64_t, T*, cudaStream_t);                   \
  template cudaError_t launchAppend<T>(const padded_samples::Strided<T>&, std::int64_t, bool, std::int64_t,       \
                                       std::int64_t, std::int64_t, T*, cudaStream_t)

TORCHEXT_INSTANTIATE(float);
TORCHEXT_INSTANTIATE(double);

}  // namespace torchext::cuda
