// CUDA kernels between packed triangles and full matrices: raw pointers and a stream, no torch.
//
// All return once the work is queued on the stream; an error of the launch is the returned code. Matrices are dense and
// row-major, one after the other; T is float or double.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

namespace torchext::cuda {

// packed = (or +=) the upper triangles of `groups` matrices of dim rows.
template <class T>
cudaError_t launchPack(const T* full, std::int64_t groups, std::int64_t dim, bool add, T* packed, cudaStream_t stream);

// Both halves of the matrices.
template <class T>
cudaError_t launchUnpack(const T* packed, std::int64_t groups, std::int64_t dim, T* full, cudaStream_t stream);

}  // namespace torchext::cuda
