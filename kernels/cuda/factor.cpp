// CUDA kernels of the operators of K-FAC's factors: cuBLAS's syrk, and kernels between triangles and full matrices.
//
// syrk does half the work of a product, but only for one matrix a call: groups of a grouped convolution are small and
// many, and go to a batched product. Everything is queued on the current stream; the handle is ATen's for it.
#include <algorithm>

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/cuda/Exceptions.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "kernels/cuda/triangle_launch.h"
#include "kernels/factor.h"

namespace torchext::kernels {

namespace {

template <class Body>
void withType(at::ScalarType type, const Body& body) {
  if (type == at::kDouble) {  // NOLINT(bugprone-branch-clone): the types differ
    body(double());
  } else {
    body(float());
  }
}

cublasStatus_t syrk(cublasHandle_t handle, cublasOperation_t operation, std::int64_t n, std::int64_t k, const float* a,
                    std::int64_t lda, float* c, std::int64_t ldc) {
  const float one = 1;
  const float zero = 0;
  return cublasSsyrk_64(handle, CUBLAS_FILL_MODE_LOWER, operation, n, k, &one, a, lda, &zero, c, ldc);
}

cublasStatus_t syrk(cublasHandle_t handle, cublasOperation_t operation, std::int64_t n, std::int64_t k, const double* a,
                    std::int64_t lda, double* c, std::int64_t ldc) {
  const double one = 1;
  const double zero = 0;
  return cublasDsyrk_64(handle, CUBLAS_FILL_MODE_LOWER, operation, n, k, &one, a, lda, &zero, c, ldc);
}

// The upper triangle of the top left inner x inner of full [1, dim, dim]; nothing else is written. cuBLAS counts by
// columns: our rows are its columns, our upper triangle is its lower one.
void symmetricProduct(const at::Tensor& full, const at::Tensor& samples, const GramSizes& sizes, bool by_dimension) {
  const at::Tensor dense = samples.contiguous();
  withType(full.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const std::int64_t stride = std::max<std::int64_t>(by_dimension ? sizes.count : sizes.inner, 1);
    TORCH_CUDABLAS_CHECK(syrk(at::cuda::getCurrentCUDABlasHandle(), by_dimension ? CUBLAS_OP_T : CUBLAS_OP_N,
                              sizes.inner, sizes.count, dense.const_data_ptr<T>(), stride, full.mutable_data_ptr<T>(),
                              sizes.dim));
  });
}

void pack(const at::Tensor& packed, const at::Tensor& full, bool add) {
  withType(packed.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    C10_CUDA_CHECK(cuda::launchPack(full.const_data_ptr<T>(), full.size(0), full.size(1), add,
                                    packed.mutable_data_ptr<T>(), c10::cuda::getCurrentCUDAStream()));
  });
}

void gramCuda(const at::Tensor& packed, const at::Tensor& samples, bool by_dimension, bool append_one, bool add) {
  const GramSizes sizes = checkGram(packed, samples, by_dimension, append_one);
  const c10::cuda::CUDAGuard guard(packed.device());
  const at::Tensor columns = by_dimension ? samples : samples.transpose(1, 2);
  if (sizes.groups != 1 && !append_one) {
    pack(packed, at::bmm(columns, columns.transpose(1, 2)), add);
    return;
  }
  const at::Tensor full = at::empty({sizes.groups, sizes.dim, sizes.dim}, packed.options());
  if (sizes.groups == 1) {
    symmetricProduct(full, samples, sizes, by_dimension);
  } else {
    full.narrow(1, 0, sizes.inner).narrow(2, 0, sizes.inner).copy_(at::bmm(columns, columns.transpose(1, 2)));
  }
  if (append_one) {
    full.select(2, sizes.inner).narrow(1, 0, sizes.inner).copy_(columns.sum(2));
    full.select(2, sizes.inner).select(1, sizes.inner).fill_(sizes.count);
  }
  pack(packed, full, add);
}

void packCuda(const at::Tensor& packed, const at::Tensor& full) {
  checkPack(packed, full);
  const c10::cuda::CUDAGuard guard(packed.device());
  pack(packed, full.contiguous(), /*add=*/false);
}

at::Tensor unpackCuda(const at::Tensor& packed, std::int64_t dim) {
  checkUnpack(packed, dim);
  const c10::cuda::CUDAGuard guard(packed.device());
  at::Tensor full = at::empty({packed.size(0), dim, dim}, packed.options());
  withType(packed.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    C10_CUDA_CHECK(cuda::launchUnpack(packed.const_data_ptr<T>(), packed.size(0), dim, full.mutable_data_ptr<T>(),
                                      c10::cuda::getCurrentCUDAStream()));
  });
  return full;
}

}  // namespace

}  // namespace torchext::kernels

TORCH_LIBRARY_IMPL(torchext, CUDA, m) {
  m.impl("packed_gram_", torchext::kernels::gramCuda);
  m.impl("pack_triangle_", torchext::kernels::packCuda);
  m.impl("unpack_triangle", torchext::kernels::unpackCuda);
}
