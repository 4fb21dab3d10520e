// CUDA kernels of K-FAC's factors: raw pointers and a stream, no torch.
//
// All return once the work is queued on the stream; an error of the launch is the returned code. Matrices are
// row-major, one after the other; T is float or double.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

#include "kernels/padded_samples.h"

namespace torchext::cuda {

// packed = (or +=) the upper triangles of the first dim rows and columns of `groups` square matrices of `stride` rows.
template <class T>
cudaError_t launchPack(const T* full, std::int64_t stride, std::int64_t groups, std::int64_t dim, bool add, T* packed,
                       cudaStream_t stream);

// Both halves of dense matrices of dim rows.
template <class T>
cudaError_t launchUnpack(const T* packed, std::int64_t groups, std::int64_t dim, T* full, cudaStream_t stream);

// to [groups, rows, columns], dense, = padded_samples::appended() of every group's samples, which are group_stride
// apart.
template <class T>
cudaError_t launchAppend(const padded_samples::Strided<T>& from, std::int64_t group_stride, bool ones_in_rows,
                         std::int64_t groups, std::int64_t rows, std::int64_t columns, T* to, cudaStream_t stream);

}  // namespace torchext::cuda
