// CUDA kernels of the operators of K-FAC's factors: products by cuBLAS, and kernels around them.
//
// The products are whole ones. cuBLAS's syrk would do half the work, but does not cut the sum over samples into pieces:
// on an H200, in float32, it took 14 times as long for 4,096 samples of 64 and 5 times for 65,536 of 576. It pays where
// samples are few and large: 0.66 of the time for 4,096 of 4,096. Everything is queued on the current stream.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "kernels/cuda/factor_launch.h"
#include "kernels/factor.h"
#include "kernels/padded_samples.h"

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

void pack(const at::Tensor& packed, const at::Tensor& full, std::int64_t dim, bool add) {
  withType(packed.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    C10_CUDA_CHECK(cuda::launchPack(full.const_data_ptr<T>(), full.size(-1), full.size(0), dim, add,
                                    packed.mutable_data_ptr<T>(), c10::cuda::getCurrentCUDAStream()));
  });
}

// A 1 more at the end of every sample, and zeros up to a multiple of padded_samples::kAligned where rows are samples.
at::Tensor withOnes(const at::Tensor& from, const GramSizes& sizes, bool by_dimension) {
  const std::int64_t rows = by_dimension ? sizes.dim : sizes.count;
  const std::int64_t columns = by_dimension ? sizes.count : padded_samples::alignedTo(sizes.dim);
  at::Tensor result = at::empty({sizes.groups, rows, columns}, from.options());
  withType(from.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const padded_samples::Strided<T> matrix{from.const_data_ptr<T>(), from.size(1), from.size(2), from.stride(1),
                                            from.stride(2)};
    C10_CUDA_CHECK(cuda::launchAppend(matrix, from.stride(0), by_dimension, sizes.groups, rows, columns,
                                      result.mutable_data_ptr<T>(), c10::cuda::getCurrentCUDAStream()));
  });
  return result;
}

void gramCuda(const at::Tensor& packed, const at::Tensor& samples, bool by_dimension, bool append_one, bool add) {
  const GramSizes sizes = checkGram(packed, samples, by_dimension, append_one);
  const c10::cuda::CUDAGuard guard(packed.device());
  const at::Tensor all = append_one ? withOnes(samples, sizes, by_dimension) : samples;
  const at::Tensor columns = by_dimension ? all : all.transpose(1, 2);
  // A product of one batch is left to at::mm: cuBLAS cuts long sums into pieces there, and not in batched products.
  const at::Tensor full =
      sizes.groups == 1 ? at::mm(columns[0], columns[0].t()).unsqueeze(0) : at::bmm(columns, columns.transpose(1, 2));
  pack(packed, full, sizes.dim, add);
}

void packCuda(const at::Tensor& packed, const at::Tensor& full) {
  checkPack(packed, full);
  const c10::cuda::CUDAGuard guard(packed.device());
  pack(packed, full.contiguous(), full.size(1), /*add=*/false);
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
