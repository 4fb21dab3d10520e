// The operators of K-FAC's factors on any device: products of samples with themselves as packed triangles.
//
//   packed_gram_(packed, samples, by_dimension, append_one, add)
//       packed [groups, d(d+1)/2] = (or +=) the upper triangle of sum x x^T over the samples x of each group, row by
//       row (packed_triangle.h). samples [groups, count, inner], or by_dimension [groups, inner, count], any
//       strides. append_one: every x has a 1 more at its end (a layer's bias), so that d = inner + 1, else d = inner.
//   pack_triangle_(packed, full)       the upper triangles of full [groups, d, d]
//   unpack_triangle(packed, dim)       [groups, dim, dim], both halves
//
// factor_generic.cpp has them in plain ATen, for every device that has no kernels of its own, the CPU among them: the
// engine's CPU path (csrc/kfac) works on raw memory and does not come here, so that the same ATen code that runs on a
// device is compared with it on any machine. kernels/cuda/factor.cpp has cuBLAS and kernels. float32 and float64;
// nothing waits for the device. In grad mode tensors that require grad are refused: there is no derivative.
//
// Errors: c10::ValueError, c10::TypeError with names and sizes, before anything is written.
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace torchext::kernels {

struct GramSizes {
  std::int64_t groups = 0;
  std::int64_t inner = 0;  // of a sample
  std::int64_t count = 0;  // of samples
  std::int64_t dim = 0;    // of the triangle
};

GramSizes checkGram(const at::Tensor& packed, const at::Tensor& samples, bool by_dimension, bool append_one);
void checkPack(const at::Tensor& packed, const at::Tensor& full);
void checkUnpack(const at::Tensor& packed, std::int64_t dim);

}  // namespace torchext::kernels
