// Schemas of the adaptive embedding bag.
#include <torch/library.h>

// The arguments that say how ids become bags are the same everywhere.
#define TORCHEXT_LAYOUT_ARGS                                                                          \
  "Tensor ids, Tensor? offsets, int bag_size, bool include_last_offset, Tensor? per_sample_weights, " \
  "int num_embeddings, int chunks, int bag_mode, int padding_idx"

TORCH_LIBRARY_FRAGMENT(torchext, m) {
  m.set_python_module("torchext.nn.operators");
  m.def("adaptive_bag(Tensor pool, Tensor index, " TORCHEXT_LAYOUT_ARGS ") -> (Tensor output, Tensor argmax)");
  m.def("adaptive_bag_weight_gradient(Tensor gradient, Tensor pool, Tensor index, " TORCHEXT_LAYOUT_ARGS ") -> Tensor");
  m.def("adaptive_bag_dense_gradient(Tensor gradient, Tensor argmax, Tensor pool, Tensor index, " TORCHEXT_LAYOUT_ARGS
        ", bool scale_by_frequency) -> Tensor");
  m.def(
      "adaptive_bag_observe_(Tensor gradient, Tensor argmax, Tensor pool, Tensor index, Tensor(a!) utility, "
      "Tensor(b!) sketch, Tensor(c!) clock, " TORCHEXT_LAYOUT_ARGS ", bool scale_by_frequency, float gamma) -> ()");
  m.def(
      "adaptive_bag_sparse_gradient(Tensor gradient, Tensor argmax, Tensor pool, Tensor index, Tensor(a!) utility, "
      "Tensor(b!) sketch, Tensor(c!) clock, " TORCHEXT_LAYOUT_ARGS
      ", bool scale_by_frequency, float gamma) -> (Tensor slots, Tensor values)");
  m.def(
      "adaptive_bag_update_(Tensor gradient, Tensor argmax, Tensor(a!) pool, Tensor(b!)[] state, Tensor index, "
      "Tensor(c!) utility, Tensor(d!) sketch, Tensor(e!) clock, Tensor lr, " TORCHEXT_LAYOUT_ARGS
      ", bool scale_by_frequency, float gamma, str optimizer, float beta1, float beta2, float eps) -> ()");
  m.def(
      "adaptive_bag_renorm_(Tensor(a!) pool, Tensor index, Tensor ids, int num_embeddings, int chunks, "
      "float max_norm, float norm_type) -> ()");
  m.def(
      "adaptive_table_prune_(Tensor(a!) index, Tensor(b!) utility, Tensor(c!) sketch, int slots, "
      "int num_embeddings, int chunks, int capacity, int max_swaps, float hysteresis) -> "
      "(Tensor moves, Tensor admitted, Tensor dropped)");
  m.def("adaptive_table_carry_(Tensor(a!) values, Tensor moves, Tensor admitted) -> ()");
  m.def("adaptive_table_meet_(Tensor(a!) seen, Tensor admitted, int chunks) -> Tensor slots");
  m.def(
      "adaptive_table_candidates(Tensor index, Tensor utility, Tensor sketch, int slots, int num_embeddings, "
      "int chunks) -> (Tensor keys, Tensor slots, Tensor utilities)");
  m.def("adaptive_table_advise_huge_pages(Tensor pool) -> bool");
}
#undef TORCHEXT_LAYOUT_ARGS
