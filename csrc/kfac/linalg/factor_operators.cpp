#include "kfac/linalg/factor_operators.h"

#include <ATen/core/dispatch/Dispatcher.h>

namespace torchext::operators {
namespace {

template <class Signature>
auto find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace

void packedGram(const at::Tensor& packed, const at::Tensor& samples, bool by_dimension, bool append_one, bool add) {
  static const auto op = find<void(const at::Tensor&, const at::Tensor&, bool, bool, bool)>("torchext::packed_gram_");
  op.call(packed, samples, by_dimension, append_one, add);
}

void packTriangle(const at::Tensor& packed, const at::Tensor& full) {
  static const auto op = find<void(const at::Tensor&, const at::Tensor&)>("torchext::pack_triangle_");
  op.call(packed, full);
}

at::Tensor unpackTriangle(const at::Tensor& packed, std::int64_t dim) {
  static const auto op = find<at::Tensor(const at::Tensor&, std::int64_t)>("torchext::unpack_triangle");
  return op.call(packed, dim);
}

}  // namespace torchext::operators
