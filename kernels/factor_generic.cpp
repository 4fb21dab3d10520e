// The operators of K-FAC's factors in plain ATen: for every device without kernels of its own.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "kernels/factor.h"

namespace torchext::kernels {

namespace {

// [d, d]: where element (i, j) of a symmetric matrix lies in its packed triangle.
at::Tensor packedPlaces(std::int64_t dim, at::Device device) {
  const at::Tensor numbers = at::arange(dim, at::TensorOptions(at::kLong).device(device));
  const at::Tensor row = at::minimum(numbers.unsqueeze(1), numbers.unsqueeze(0));
  const at::Tensor column = at::maximum(numbers.unsqueeze(1), numbers.unsqueeze(0));
  return row * dim - at::div(row * (row - 1), 2, "trunc") + column - row;
}

// [d(d+1)/2]: which element of a flattened matrix each place of a packed triangle holds.
at::Tensor fullPlaces(std::int64_t dim, at::Device device) {
  const at::Tensor pairs = at::triu_indices(dim, dim, 0, at::TensorOptions(at::kLong).device(device));
  return pairs.select(0, 0) * dim + pairs.select(0, 1);
}

void put(const at::Tensor& packed, const at::Tensor& full, bool add) {
  const at::Tensor triangle = full.reshape({full.size(0), -1}).index_select(1, fullPlaces(full.size(1), full.device()));
  if (add) {
    packed.add_(triangle);
  } else {
    packed.copy_(triangle);
  }
}

void gramGeneric(const at::Tensor& packed, const at::Tensor& samples, bool by_dimension, bool append_one, bool add) {
  const GramSizes sizes = checkGram(packed, samples, by_dimension, append_one);
  const at::Tensor columns = by_dimension ? samples : samples.transpose(1, 2);  // [groups, inner, count]
  const at::Tensor products = at::bmm(columns, columns.transpose(1, 2));
  if (!append_one) {
    put(packed, products, add);
    return;
  }
  at::Tensor full = at::empty({sizes.groups, sizes.dim, sizes.dim}, products.options());
  full.narrow(1, 0, sizes.inner).narrow(2, 0, sizes.inner).copy_(products);
  full.select(2, sizes.inner).narrow(1, 0, sizes.inner).copy_(columns.sum(2));
  full.select(2, sizes.inner).select(1, sizes.inner).fill_(sizes.count);
  put(packed, full, add);
}

void packGeneric(const at::Tensor& packed, const at::Tensor& full) {
  checkPack(packed, full);
  put(packed, full, /*add=*/false);
}

at::Tensor unpackGeneric(const at::Tensor& packed, std::int64_t dim) {
  checkUnpack(packed, dim);
  return packed.index_select(1, packedPlaces(dim, packed.device()).flatten()).view({packed.size(0), dim, dim});
}

}  // namespace

}  // namespace torchext::kernels

TORCH_LIBRARY_IMPL(torchext, CompositeExplicitAutograd, m) {
  m.impl("packed_gram_", torchext::kernels::gramGeneric);
  m.impl("pack_triangle_", torchext::kernels::packGeneric);
  m.impl("unpack_triangle", torchext::kernels::unpackGeneric);
}
