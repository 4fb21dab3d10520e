// Stands in for the CUDA kernels in a build without them: an error that names the way out, instead of the dispatcher's
// list of keys.
#include <torch/library.h>

namespace torchext::kernels {

namespace {

[[noreturn]] void raise(const char* op) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, op,
      ": torchext was built without CUDA kernels (python -m torchext says why). Build them with "
      "TORCHEXT_CUDA=1 pip install --no-build-isolation <the torchext source folder>");
}

void flattenAbsent(at::TensorList /*tensors*/, const at::Tensor& /*flat*/) { raise("multi_tensor_flatten"); }

void averageAbsent(at::TensorList /*tensors*/, const at::Tensor& /*flat*/, double /*scale*/) {
  raise("multi_tensor_average_");
}

}  // namespace

}  // namespace torchext::kernels

TORCH_LIBRARY_IMPL(torchext, CUDA, m) {
  m.impl("multi_tensor_flatten", torchext::kernels::flattenAbsent);
  m.impl("multi_tensor_average_", torchext::kernels::averageAbsent);
}
