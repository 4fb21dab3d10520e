// The operators on a table on CUDA between steps. Pruning and listing are decided by the CPU's operators, on copies:
// they are rare, and a table decides alike on every device.
#include <ATen/ops/index_copy.h>
#include <ATen/ops/index_fill.h>
#include <ATen/ops/index_select.h>
#include <torch/library.h>

#include "kernels/bag_dispatch.h"
#include "kernels/cuda/bag_elements.h"
#include "kernels/cuda/bag_tensors.h"

namespace torchext::kernels {

namespace {

using Lists = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

Lists onDevice(const Lists& lists, at::Device device) {
  const auto& [first, second, third] = lists;
  return {first.to(device), second.to(device), third.to(device)};
}

void checkTogether(const char* op, const at::Tensor& index, const at::Tensor& utility, const at::Tensor& sketch) {
  checkDevice(op, "utility", utility, index.device());
  checkDevice(op, "sketch", sketch, index.device());
}

Lists pruneCuda(const at::Tensor& index, const at::Tensor& utility, const at::Tensor& sketch, std::int64_t slots,
                std::int64_t rows, std::int64_t chunks, std::int64_t capacity, std::int64_t max_swaps,
                double hysteresis) {
  static const auto on_cpu = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow("torchext::adaptive_table_prune_", "")
                                 .typed<Lists(const at::Tensor&, const at::Tensor&, const at::Tensor&, std::int64_t,
                                              std::int64_t, std::int64_t, std::int64_t, std::int64_t, double)>();
  checkTogether("adaptive_table_prune_", index, utility, sketch);
  const at::Tensor host_index = index.cpu();
  const at::Tensor host_utility = utility.cpu();
  const at::Tensor host_sketch = sketch.cpu();
  const Lists lists =
      on_cpu.call(host_index, host_utility, host_sketch, slots, rows, chunks, capacity, max_swaps, hysteresis);
  // Whole: finding and scattering the cells that changed would cost the host more than the copy.
  index.copy_(host_index);
  if (sketch.numel() > 0) {  // elsewhere chunks keep their utility wherever they are
    utility.copy_(host_utility);
    sketch.copy_(host_sketch);
  }
  return onDevice(lists, index.device());
}

void carryCuda(const at::Tensor& values, const at::Tensor& moves, const at::Tensor& admitted) {
  constexpr const char* kOp = "adaptive_table_carry_";
  checkDevice(kOp, "moves", moves, values.device());
  checkDevice(kOp, "admitted", admitted, values.device());
  at::Tensor to = values;
  if (moves.size(0) > 0) {  // all are read before any is written: on a device they have no order
    to.index_copy_(0, moves.select(1, 1), values.index_select(0, moves.select(1, 0)));
  }
  to.index_fill_(0, admitted.select(1, 1), 0);
}

at::Tensor meetCuda(const at::Tensor& seen, const at::Tensor& admitted, std::int64_t chunks) {
  static const auto on_cpu = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow("torchext::adaptive_table_meet_", "")
                                 .typed<at::Tensor(const at::Tensor&, const at::Tensor&, std::int64_t)>();
  checkDevice("adaptive_table_meet_", "admitted", admitted, seen.device());
  const at::Tensor host_seen = seen.cpu();
  const at::Tensor fresh = on_cpu.call(host_seen, admitted.cpu(), chunks);
  seen.copy_(host_seen);
  return fresh.to(seen.device());
}

Lists candidatesCuda(const at::Tensor& index, const at::Tensor& utility, const at::Tensor& sketch, std::int64_t slots,
                     std::int64_t rows, std::int64_t chunks) {
  static const auto on_cpu = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow("torchext::adaptive_table_candidates", "")
                                 .typed<Lists(const at::Tensor&, const at::Tensor&, const at::Tensor&, std::int64_t,
                                              std::int64_t, std::int64_t)>();
  checkTogether("adaptive_table_candidates", index, utility, sketch);
  return onDevice(on_cpu.call(index.cpu(), utility.cpu(), sketch.cpu(), slots, rows, chunks), index.device());
}

void renormCuda(const at::Tensor& pool, const at::Tensor& index, const at::Tensor& ids, std::int64_t rows,
                std::int64_t chunks, double max_norm, double norm_type) {
  constexpr const char* kOp = "adaptive_bag_renorm_";
  TORCH_CHECK_VALUE(norm_type > 0, kOp, ": norm_type is ", norm_type, "; allowed: above 0");
  cuda::TableView table = tableView(kOp, pool, index, rows, chunks, true);
  const DeviceScope scope(pool);
  const std::optional<at::Tensor> none;
  DeviceBatch batch(kOp, {ids, none, 1, false, 0, -1}, pool, rows);
  batch.check(scope);
  const DeviceRuns runs(scope, batch.view(), pool, {}, 0);
  batch.requireGood();  // before anything is written
  setAligned(table, {pool.const_data_ptr()});
  TORCHEXT_DISPATCH_POOL(pool.scalar_type(), [&] {
    using T = cuda::ElementOf<scalar_t>;
    DeviceScope::check(cuda::launchRenorm<T>(
        {runs.space().runs(batch.view()), table, static_cast<T*>(pool.mutable_data_ptr()), max_norm, norm_type},
        scope.stream()));
  });
}

bool adviseHugePagesCuda(const at::Tensor& /*pool*/) { return false; }

}  // namespace

}  // namespace torchext::kernels

TORCH_LIBRARY_IMPL(torchext, TORCHEXT_DEVICE_KEY, m) {
  m.impl("adaptive_table_prune_", torchext::kernels::pruneCuda);
  m.impl("adaptive_table_carry_", torchext::kernels::carryCuda);
  m.impl("adaptive_table_meet_", torchext::kernels::meetCuda);
  m.impl("adaptive_table_candidates", torchext::kernels::candidatesCuda);
  m.impl("adaptive_bag_renorm_", torchext::kernels::renormCuda);
  m.impl("adaptive_table_advise_huge_pages", torchext::kernels::adviseHugePagesCuda);
}
