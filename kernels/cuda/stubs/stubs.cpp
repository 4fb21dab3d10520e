// Stands in for the CUDA kernels in a build without them: an error that names the way out, instead of the dispatcher's
// list of keys.
#include <torch/library.h>

namespace torchext::kernels {

namespace {

void raise(const c10::OperatorHandle& op, torch::jit::Stack* /*stack*/) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, op.schema().name(),
      ": torchext was built without CUDA kernels (python -m torchext says why). Build them with "
      "TORCHEXT_CUDA=1 pip install --no-build-isolation <the torchext source folder>");
}

}  // namespace

}  // namespace torchext::kernels

TORCH_LIBRARY_IMPL(torchext, CUDA, m) {
  for (const char* name :
       {"multi_tensor_flatten", "multi_tensor_average_", "adaptive_bag", "adaptive_bag_weight_gradient",
        "adaptive_bag_dense_gradient", "adaptive_bag_observe_", "adaptive_bag_sparse_gradient", "adaptive_bag_update_",
        "adaptive_bag_renorm_", "adaptive_table_prune_", "adaptive_table_carry_", "adaptive_table_meet_",
        "adaptive_table_candidates", "adaptive_table_advise_huge_pages"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&torchext::kernels::raise>());
  }
}
