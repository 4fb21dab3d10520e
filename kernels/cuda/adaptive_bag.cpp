// CUDA operators of the adaptive embedding bag that write nothing of a table: from tensors to raw pointers on the
// current stream.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "kernels/bag_dispatch.h"
#include "kernels/cuda/bag_elements.h"
#include "kernels/cuda/bag_tensors.h"

namespace torchext::kernels {

namespace {

std::tuple<at::Tensor, at::Tensor> forwardCuda(const at::Tensor& pool, const at::Tensor& index, const at::Tensor& ids,
                                               const OptionalTensor& offsets, std::int64_t bag_size, bool include_last,
                                               const OptionalTensor& weights, std::int64_t rows, std::int64_t chunks,
                                               std::int64_t mode, std::int64_t padding_idx) {
  constexpr const char* kOp = "adaptive_bag";
  const BagLayout layout{ids, offsets, bag_size, include_last, mode, padding_idx};
  checkWeights(kOp, weights, layout, pool);
  cuda::TableView table = tableView(kOp, pool, index, rows, chunks, true);
  const DeviceScope scope(pool);
  DeviceBatch batch(kOp, layout, pool, rows);
  batch.check(scope);
  const std::int64_t dim = chunks * pool.size(1);
  const bool max = batch.view().mode == cpu::BagMode::kMax;
  at::Tensor output = at::empty({batch.view().bags, dim}, pool.options());
  at::Tensor argmax = at::empty({max ? batch.view().bags : 0, dim}, pool.options().dtype(at::kInt));
  const at::Tensor dense = weights.has_value() ? weights->contiguous() : at::Tensor();
  setAligned(table, {pool.const_data_ptr(), output.const_data_ptr()});
  TORCHEXT_DISPATCH_POOL(pool.scalar_type(), [&] {
    using T = cuda::ElementOf<scalar_t>;
    DeviceScope::check(cuda::launchForward<T>(
        {batch.view(), table, static_cast<const T*>(pool.const_data_ptr()),
         dense.defined() ? static_cast<const T*>(dense.const_data_ptr()) : nullptr,
         static_cast<T*>(output.mutable_data_ptr()), max ? argmax.mutable_data_ptr<std::int32_t>() : nullptr},
        scope.stream()));
  });
  batch.requireGood();  // the device has work while the host waits
  return {output, argmax};
}

at::Tensor weightGradientCuda(const at::Tensor& gradient, const at::Tensor& pool, const at::Tensor& index,
                              const at::Tensor& ids, const OptionalTensor& offsets, std::int64_t bag_size,
                              bool include_last, const OptionalTensor& weights, std::int64_t rows, std::int64_t chunks,
                              std::int64_t mode, std::int64_t padding_idx) {
  constexpr const char* kOp = "adaptive_bag_weight_gradient";
  const BagLayout layout{ids, offsets, bag_size, include_last, mode, padding_idx};
  checkWeights(kOp, weights, layout, pool);
  cuda::TableView table = tableView(kOp, pool, index, rows, chunks, true);
  checkDevice(kOp, "gradient", gradient, pool.device());
  const DeviceScope scope(pool);
  const DeviceBatch batch(kOp, layout, pool, rows);
  TORCH_CHECK_VALUE(
      gradient.dim() == 2 && gradient.size(0) == batch.view().bags && gradient.size(1) == chunks * pool.size(1), kOp,
      ": gradient has shape ", gradient.sizes());
  TORCH_CHECK_TYPE(gradient.scalar_type() == pool.scalar_type(), kOp, ": gradient is ", gradient.scalar_type(),
                   ", the table ", pool.scalar_type());
  const at::Tensor dense = gradient.contiguous();
  at::Tensor result = at::empty(ids.sizes(), pool.options());
  setAligned(table, {pool.const_data_ptr(), dense.const_data_ptr()});
  TORCHEXT_DISPATCH_POOL(pool.scalar_type(), [&] {
    using T = cuda::ElementOf<scalar_t>;
    DeviceScope::check(cuda::launchWeightGradient<T>(
        {batch.view(), table, static_cast<const T*>(pool.const_data_ptr()),
         static_cast<const T*>(dense.const_data_ptr()), static_cast<T*>(result.mutable_data_ptr())},
        scope.stream()));
  });
  return result;
}

}  // namespace

}  // namespace torchext::kernels

TORCH_LIBRARY_IMPL(torchext, TORCHEXT_DEVICE_KEY, m) {
  m.impl("adaptive_bag", torchext::kernels::forwardCuda);
  m.impl("adaptive_bag_weight_gradient", torchext::kernels::weightGradientCuda);
}
