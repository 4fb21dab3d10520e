#include "kernels/cuda/triangle_launch.h"

#include "kernels/triangle.h"

namespace torchext::cuda {

namespace {

constexpr int kPackThreads = 128;
constexpr int kLines = 8;                // rows of a tile that a block of kTile x kLines threads takes at once
constexpr unsigned kMostGroups = 65535;  // of a grid's second dimension; blocks go on from there

template <class T>
__global__ void __launch_bounds__(kPackThreads)
    packKernel(const T* full, std::int64_t groups, std::int64_t dim, bool add, T* packed) {
  for (std::int64_t group = blockIdx.y; group < groups; group += gridDim.y) {
    triangle::packRow(full + group * dim * dim, dim, blockIdx.x, add, threadIdx.x, kPackThreads,
                      packed + group * triangle::packedSize(dim));
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
cudaError_t launchPack(const T* full, std::int64_t groups, std::int64_t dim, bool add, T* packed, cudaStream_t stream) {
  if (groups == 0 || dim == 0) {
    return cudaSuccess;
  }
  const dim3 blocks(static_cast<unsigned>(dim), groupBlocks(groups));
  packKernel<<<blocks, kPackThreads, 0, stream>>>(full, groups, dim, add, packed);
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

template cudaError_t launchPack<float>(const float*, std::int64_t, std::int64_t, bool, float*, cudaStream_t);
template cudaError_t launchPack<double>(const double*, std::int64_t, std::int64_t, bool, double*, cudaStream_t);
template cudaError_t launchUnpack<float>(const float*, std::int64_t, std::int64_t, float*, cudaStream_t);
template cudaError_t launchUnpack<double>(const double*, std::int64_t, std::int64_t, double*, cudaStream_t);

}  // namespace torchext::cuda
