// Schemas, checks and the answer to autograd of the operators of K-FAC's factors.
#include "kernels/factor.h"

#include <initializer_list>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <torch/library.h>

#include "kernels/triangle.h"
#include "kernels/version.h"

namespace torchext::kernels {

namespace {

using Named = std::pair<const char*, const at::Tensor&>;

void checkPair(const char* op, Named one, Named other) {
  for (const Named& named : {one, other}) {
    TORCH_CHECK_TYPE(named.second.scalar_type() == at::kFloat || named.second.scalar_type() == at::kDouble, op, ": ",
                     named.first, " is ", named.second.scalar_type(), "; supported are Float, Double");
  }
  TORCH_CHECK_TYPE(one.second.scalar_type() == other.second.scalar_type(), op, ": ", one.first, " is ",
                   one.second.scalar_type(), ", ", other.first, " is ", other.second.scalar_type(),
                   "; they must be the same");
  TORCH_CHECK_VALUE(one.second.device() == other.second.device(), op, ": ", one.first, " is on ", one.second.device(),
                    ", ", other.first, " on ", other.second.device(), "; both must be on one device");
}

void checkPacked(const char* op, const at::Tensor& packed, std::int64_t groups, std::int64_t dim) {
  TORCH_CHECK_VALUE(packed.dim() == 2 && packed.size(0) == groups && packed.size(1) == triangle::packedSize(dim), op,
                    ": packed has shape ", packed.sizes(), ", must be [", groups, ", ", triangle::packedSize(dim),
                    "], the triangles of ", groups, " matrices of ", dim, " rows");
  TORCH_CHECK_VALUE(packed.is_contiguous(), op, ": packed must be contiguous, got strides ", packed.strides());
}

void checkNoGrad(const char* op, std::initializer_list<Named> tensors) {
  for (const auto& [name, tensor] : tensors) {
    TORCH_CHECK(!at::GradMode::is_enabled() || !tensor.requires_grad(), op, ": ", name,
                " requires grad, and this operator has no derivative; call it under torch.no_grad()");
  }
}

void gramAutograd(const at::Tensor& packed, const at::Tensor& samples, bool by_dimension, bool append_one, bool add) {
  checkNoGrad("packed_gram_", {{"packed", packed}, {"samples", samples}});
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("torchext::packed_gram_", "")
                             .typed<void(const at::Tensor&, const at::Tensor&, bool, bool, bool)>();
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    op.call(packed, samples, by_dimension, append_one, add);
  }
  bumpVersion(packed);
}

void packAutograd(const at::Tensor& packed, const at::Tensor& full) {
  checkNoGrad("pack_triangle_", {{"packed", packed}, {"full", full}});
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("torchext::pack_triangle_", "")
                             .typed<void(const at::Tensor&, const at::Tensor&)>();
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    op.call(packed, full);
  }
  bumpVersion(packed);
}

at::Tensor unpackAutograd(const at::Tensor& packed, std::int64_t dim) {
  checkNoGrad("unpack_triangle", {{"packed", packed}});
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("torchext::unpack_triangle", "")
                             .typed<at::Tensor(const at::Tensor&, std::int64_t)>();
  const at::AutoDispatchBelowADInplaceOrView below;
  return op.call(packed, dim);
}

}  // namespace

GramSizes checkGram(const at::Tensor& packed, const at::Tensor& samples, bool by_dimension, bool append_one) {
  constexpr const char* kOp = "packed_gram_";
  checkPair(kOp, {"packed", packed}, {"samples", samples});
  TORCH_CHECK_VALUE(samples.dim() == 3, kOp, ": samples must be 3-D, ",
                    by_dimension ? "[groups, inner, count]" : "[groups, count, inner]", ", got shape ",
                    samples.sizes());
  GramSizes sizes{samples.size(0), samples.size(by_dimension ? 1 : 2), samples.size(by_dimension ? 2 : 1), 0};
  sizes.dim = sizes.inner + (append_one ? 1 : 0);
  checkPacked(kOp, packed, sizes.groups, sizes.dim);
  return sizes;
}

void checkPack(const at::Tensor& packed, const at::Tensor& full) {
  constexpr const char* kOp = "pack_triangle_";
  checkPair(kOp, {"packed", packed}, {"full", full});
  TORCH_CHECK_VALUE(full.dim() == 3 && full.size(1) == full.size(2), kOp,
                    ": full must be square matrices [groups, d, d], got shape ", full.sizes());
  checkPacked(kOp, packed, full.size(0), full.size(1));
}

void checkUnpack(const at::Tensor& packed, std::int64_t dim) {
  constexpr const char* kOp = "unpack_triangle";
  checkPair(kOp, {"packed", packed}, {"packed", packed});
  TORCH_CHECK_VALUE(dim >= 0, kOp, ": dim = ", dim, ": allowed 0 or more");
  checkPacked(kOp, packed, packed.dim() == 2 ? packed.size(0) : 1, dim);
}

}  // namespace torchext::kernels

TORCH_LIBRARY_FRAGMENT(torchext, m) {
  m.set_python_module("torchext.optim.operators");  // named in the error when the fake kernels have not been imported
  m.def("packed_gram_(Tensor(a!) packed, Tensor samples, bool by_dimension, bool append_one, bool add) -> ()");
  m.def("pack_triangle_(Tensor(a!) packed, Tensor full) -> ()");
  m.def("unpack_triangle(Tensor packed, int dim) -> Tensor");
}

TORCH_LIBRARY_IMPL(torchext, Autograd, m) {
  m.impl("packed_gram_", torchext::kernels::gramAutograd);
  m.impl("pack_triangle_", torchext::kernels::packAutograd);
  m.impl("unpack_triangle", torchext::kernels::unpackAutograd);
}
