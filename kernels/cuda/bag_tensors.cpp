#include "kernels/cuda/bag_tensors.h"

#include <algorithm>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

namespace torchext::kernels {

void checkDevice(const char* op, const char* name, const at::Tensor& tensor, at::Device device) {
  TORCH_CHECK_VALUE(tensor.device() == device, op, ": ", name, " is on ", tensor.device(), ", the table on ", device,
                    "; all must be on one device");
}

cuda::TableView tableView(const char* op, const at::Tensor& pool, const at::Tensor& index, std::int64_t rows,
                          std::int64_t chunks, bool whole_rows) {
  TORCH_CHECK_VALUE(pool.device().type() == kDeviceType, op, ": pool is on ", pool.device(),
                    ", another argument on a GPU; all must be on one device");
  checkTable(op, pool, index, rows, chunks);
  const core::ChunkIndex checked = indexOf(op, index, pool.device(), rows, chunks);
  cuda::TableView table;
  table.layout = checked.layout();
  table.rows = rows;
  table.chunks = checked.chunks();
  table.chunk_dim = static_cast<int>(pool.size(1));
  if (table.layout == core::ChunkIndex::Layout::kDirect) {
    table.direct = index.const_data_ptr<std::int32_t>();
  } else if (table.layout == core::ChunkIndex::Layout::kHashed) {
    table.hashed = index.const_data_ptr<std::int64_t>();
    table.cells = static_cast<std::size_t>(index.numel());
  } else if (whole_rows) {
    table.chunk_dim *= table.chunks;
    table.chunks = 1;
  }
  return table;
}

void setAligned(cuda::TableView& table, std::initializer_list<const void*> arrays) {
  table.aligned = table.chunk_dim % cuda::kQuad == 0 && std::all_of(arrays.begin(), arrays.end(), [](const void* at) {
                    return reinterpret_cast<std::uintptr_t>(at) % cuda::kQuadAlignment == 0;
                  });
}

DeviceBatch::DeviceBatch(const char* op, const BagLayout& layout, const at::Tensor& pool, std::int64_t rows)
    : op_(op), layout_(layout), rows_(rows) {
  TORCH_CHECK_NOT_IMPLEMENTED(!DeviceScope::capturing(), op,
                              ": cannot be recorded in a CUDA graph, because ids are checked and steps counted on the "
                              "host; leave the embedding out of the graph");
  checkLayout(op, layout, pool.device(), rows);
  ids_ = layout.ids.contiguous();
  view_.positions = ids_.numel();
  if (ids_.scalar_type() == at::kInt) {
    view_.ids32 = ids_.const_data_ptr<std::int32_t>();
  } else {
    view_.ids64 = ids_.const_data_ptr<std::int64_t>();
  }
  if (layout.offsets.has_value()) {
    offsets_ = layout.offsets->contiguous();
    view_.offset_count = offsets_->numel();
    view_.bags = view_.offset_count - (layout.include_last_offset ? 1 : 0);
    if (offsets_->scalar_type() == at::kInt) {
      view_.offsets32 = offsets_->const_data_ptr<std::int32_t>();
    } else {
      view_.offsets64 = offsets_->const_data_ptr<std::int64_t>();
    }
  } else if (layout.bag_size >= 1) {
    view_.bag_size = layout.bag_size;
    view_.bags = view_.positions / layout.bag_size;
  }
  TORCH_CHECK_VALUE(view_.bags < std::numeric_limits<std::int32_t>::max(), op, ": ", view_.bags,
                    " bags in one batch; at most 2^31 - 2 are supported");
  view_.rows = rows;
  view_.padding = layout.padding_idx;
  view_.mode = static_cast<cpu::BagMode>(layout.mode);
}

void DeviceBatch::check(const DeviceScope& scope) {
  bad_ = at::zeros({1}, ids_.options().dtype(at::kInt));
  DeviceScope::check(cuda::launchCheck(view_, bad_.mutable_data_ptr<std::int32_t>(), scope.stream()));
}

void DeviceBatch::requireGood() const {
  if (bad_.item().toInt() == 0) {
    return;
  }
  const at::Tensor ids = ids_.cpu();
  const OptionalTensor offsets = offsets_.has_value() ? OptionalTensor(offsets_->cpu()) : std::nullopt;
  batchOf(op_, {ids, offsets, layout_.bag_size, layout_.include_last_offset, layout_.mode, layout_.padding_idx}, rows_);
  TORCH_INTERNAL_ASSERT(false, op_, ": the device found a bad id or offset, the host did not");
}

DeviceRuns::DeviceRuns(const DeviceScope& scope, const cuda::BatchView& batch, const at::Tensor& pool,
                       cuda::WorkspaceSizes sizes, std::int64_t cells) {
  sizes.positions = batch.positions;
  sizes.math_bytes = pool.scalar_type() == at::kDouble ? sizeof(double) : sizeof(float);
  std::size_t sketch_bytes = 0;
  DeviceScope::check(cuda::sortBytes(batch.positions, batch.rows, &sizes.sort_bytes));
  DeviceScope::check(cuda::sortBytes(sizes.sketched, cells, &sketch_bytes));
  sizes.sort_bytes = std::max(sizes.sort_bytes, sketch_bytes);
  const auto bytes = static_cast<std::int64_t>(cuda::layOut(nullptr, sizes).bytes);
  memory_ = at::empty({bytes}, pool.options().dtype(at::kByte));
  space_ = cuda::layOut(memory_.mutable_data_ptr(), sizes);
  DeviceScope::check(cuda::launchGrouping(batch, space_, scope.stream()));
}

}  // namespace torchext::kernels
