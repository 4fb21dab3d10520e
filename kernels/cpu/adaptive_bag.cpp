// CPU kernels of the adaptive embedding bag that write nothing of a table: the bags, and the gradient of their weights.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "kernels/adaptive_bag.h"
#include "kernels/bag_dispatch.h"
#include "kernels/cpu/bag_forward.h"

namespace torchext::kernels {

namespace {

using OptionalTensor = std::optional<at::Tensor>;

// The index as a reader sees it: where all is resident in order, a row is one chunk.
struct ReadableTable {
  core::ChunkIndex index;
  std::size_t chunk_dim;  // columns of a chunk of this index
};

ReadableTable readableTable(const char* op, const at::Tensor& pool, const at::Tensor& index, std::int64_t rows,
                            std::int64_t chunks) {
  checkTable(op, pool, index, rows, chunks);
  const core::ChunkIndex table = indexOf(op, index, at::kCPU, rows, chunks);
  if (table.layout() == core::ChunkIndex::Layout::kIdentity) {
    return {core::ChunkIndex::identity(rows, 1), static_cast<std::size_t>(chunks * pool.size(1))};
  }
  return {table, static_cast<std::size_t>(pool.size(1))};
}

std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& pool, const at::Tensor& index, const at::Tensor& ids,
                                           const OptionalTensor& offsets, std::int64_t bag_size, bool include_last,
                                           const OptionalTensor& weights, std::int64_t rows, std::int64_t chunks,
                                           std::int64_t mode, std::int64_t padding_idx) {
  constexpr const char* kOp = "adaptive_bag";
  const BagLayout layout{ids, offsets, bag_size, include_last, mode, padding_idx};
  checkWeights(kOp, weights, layout, pool);
  const ReadableTable table = readableTable(kOp, pool, index, rows, chunks);
  const cpu::BagBatch batch = batchOf(kOp, layout, rows);
  const std::int64_t dim = chunks * pool.size(1);
  at::Tensor output = at::empty({batch.bags(), dim}, pool.options());
  const bool max = batch.mode == cpu::BagMode::kMax;
  at::Tensor argmax = at::empty({max ? batch.bags() : 0, dim}, pool.options().dtype(at::kInt));
  const OptionalTensor dense = weights.has_value() ? OptionalTensor(weights->contiguous()) : std::nullopt;
  TORCHEXT_DISPATCH_POOL(pool.scalar_type(), [&] {
    const cpu::ForwardArgs<scalar_t> args{batch,
                                          table.index,
                                          pool.const_data_ptr<scalar_t>(),
                                          dense.has_value() ? dense->const_data_ptr<scalar_t>() : nullptr,
                                          output.mutable_data_ptr<scalar_t>(),
                                          max ? argmax.mutable_data_ptr<std::int32_t>() : nullptr};
    cpu::withWidth<scalar_t>(table.chunk_dim, [&](auto chunk_dim) {
      at::parallel_for(0, batch.bags(), kGrain, [&](std::int64_t begin, std::int64_t end) {
        cpu::onBestIsa<cpu::ForwardKernel>(args, chunk_dim, begin, end);
      });
    });
  });
  return {output, argmax};
}

at::Tensor weightGradient(const at::Tensor& gradient, const at::Tensor& pool, const at::Tensor& index,
                          const at::Tensor& ids, const OptionalTensor& offsets, std::int64_t bag_size,
                          bool include_last, const OptionalTensor& weights, std::int64_t rows, std::int64_t chunks,
                          std::int64_t mode, std::int64_t padding_idx) {
  constexpr const char* kOp = "adaptive_bag_weight_gradient";
  const BagLayout layout{ids, offsets, bag_size, include_last, mode, padding_idx};
  checkWeights(kOp, weights, layout, pool);
  const ReadableTable table = readableTable(kOp, pool, index, rows, chunks);
  const cpu::BagBatch batch = batchOf(kOp, layout, rows);
  TORCH_CHECK_VALUE(
      gradient.dim() == 2 && gradient.size(0) == batch.bags() && gradient.size(1) == chunks * pool.size(1), kOp,
      ": gradient has shape ", gradient.sizes());
  const at::Tensor dense = gradient.contiguous();
  at::Tensor result = at::zeros_like(ids, pool.options());
  TORCHEXT_DISPATCH_POOL(pool.scalar_type(), [&] {
    const cpu::WeightGradientArgs<scalar_t> args{batch, table.index, pool.const_data_ptr<scalar_t>(),
                                                 dense.const_data_ptr<scalar_t>(), result.mutable_data_ptr<scalar_t>()};
    cpu::withWidth<scalar_t>(table.chunk_dim, [&](auto chunk_dim) {
      at::parallel_for(0, batch.bags(), kGrain, [&](std::int64_t begin, std::int64_t end) {
        cpu::onBestIsa<cpu::WeightGradientKernel>(args, chunk_dim, begin, end);
      });
    });
  });
  return result;
}

}  // namespace

}  // namespace torchext::kernels

TORCH_LIBRARY_IMPL(torchext, CPU, m) {
  m.impl("adaptive_bag", torchext::kernels::forward);
  m.impl("adaptive_bag_weight_gradient", torchext::kernels::weightGradient);
}
