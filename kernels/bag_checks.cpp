// The checks of the adaptive embedding bag's arguments, on any device.
#include "kernels/adaptive_bag.h"

#include <stdexcept>

#include <ATen/core/Tensor.h>

namespace torchext::kernels {

namespace {

template <class Build>
auto orValueError(const char* op, Build&& build) {
  try {
    return build();
  } catch (const std::invalid_argument& error) {
    C10_THROW_ERROR(ValueError, c10::str(op, ": ", error.what()));
  }
}

void checkIntegers(const char* op, const char* name, const at::Tensor& tensor, at::Device device) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kInt || tensor.scalar_type() == at::kLong, op, ": ", name, " is ",
                   tensor.scalar_type(), "; allowed are Int and Long (int32, int64)");
  TORCH_CHECK_VALUE(tensor.dim() == 1, op, ": ", name, " must be 1-D, got shape ", tensor.sizes());
  TORCH_CHECK_VALUE(tensor.device() == device, op, ": ", name, " is on ", tensor.device(), "; the table is on ",
                    device);
}

template <class Id>
void readIds(const char* op, const at::Tensor& ids, std::int64_t rows, cpu::Buffer<std::uint32_t>& to) {
  const at::Tensor dense = ids.contiguous();
  const Id* from = dense.const_data_ptr<Id>();
  const auto count = static_cast<std::size_t>(dense.numel());
  to.resize(count);
  bool good = true;
  for (std::size_t i = 0; i < count; ++i) {
    // A negative id is a large unsigned one.
    good &= static_cast<std::uint64_t>(static_cast<std::int64_t>(from[i])) < static_cast<std::uint64_t>(rows);
    to[i] = static_cast<std::uint32_t>(from[i]);
  }
  for (std::size_t i = 0; !good && i < count; ++i) {
    TORCH_CHECK_INDEX(from[i] >= 0 && from[i] < rows, op, ": id ", from[i], " at position ", i,
                      " is out of range; the table has rows 0..", rows - 1);
  }
}

void readOffsets(const char* op, const BagLayout& layout, std::int64_t count, std::vector<std::int64_t>& to) {
  if (!layout.offsets.has_value()) {
    const std::int64_t bags = layout.bag_size >= 1 ? count / layout.bag_size : 0;
    to.reserve(static_cast<std::size_t>(bags) + 1);
    for (std::int64_t bag = 0; bag <= bags; ++bag) {
      to.push_back(bag * layout.bag_size);
    }
    return;
  }
  const at::Tensor offsets = layout.offsets->to(at::kLong).contiguous();
  to.assign(offsets.const_data_ptr<std::int64_t>(), offsets.const_data_ptr<std::int64_t>() + offsets.numel());
  if (!layout.include_last_offset) {
    to.push_back(count);
  }
  for (std::size_t i = 0; i < to.size(); ++i) {
    const std::int64_t before = i == 0 ? 0 : to[i - 1];
    TORCH_CHECK_VALUE(i > 0 || to.size() == 1 || to[0] == 0, op, ": offsets[0] is ", to[0],
                      ", but the first bag must begin at 0");
    TORCH_CHECK_VALUE(to[i] <= count, op, ": offsets[", i, "] is ", to[i], ", past the end of ", count, " ids");
    TORCH_CHECK_VALUE(to[i] >= before, op, ": offsets[", i, "] is ", to[i], ", less than the one before it, ", before);
  }
  if (to.size() == 1) {
    to[0] = 0;  // no bags at all
  }
}

}  // namespace

void checkTable(const char* op, const at::Tensor& pool, const at::Tensor& index, std::int64_t rows,
                std::int64_t chunks) {
  const auto type = pool.scalar_type();
  TORCH_CHECK_TYPE(type == at::kFloat || type == at::kDouble || type == at::kHalf || type == at::kBFloat16, op,
                   ": pool is ", type, "; supported are Float, Double, Half, BFloat16");
  TORCH_CHECK_VALUE(pool.dim() == 2 && pool.is_contiguous(), op, ": pool must be contiguous, slots x chunk_dim; got ",
                    pool.sizes());
  if (index.numel() == 0 && index.scalar_type() == at::kInt) {
    TORCH_CHECK_VALUE(pool.size(0) == rows * chunks, op, ": without an index pool must hold all ", rows * chunks,
                      " chunks, but has ", pool.size(0), " slots");
  }
}

core::ChunkIndex indexOf(const char* op, const at::Tensor& index, at::Device device, std::int64_t rows,
                         std::int64_t chunks) {
  TORCH_CHECK_VALUE(index.dim() == 1 && index.is_contiguous() && index.device() == device, op,
                    ": index must be 1-D, contiguous and on ", device, ", got shape ", index.sizes(), " on ",
                    index.device());
  TORCH_CHECK_TYPE(index.scalar_type() == at::kInt || index.scalar_type() == at::kLong, op, ": index is ",
                   index.scalar_type(), "; allowed are Int (direct) and Long (hashed)");
  // Read-only operators take the same view: it writes only in insert and erase.
  auto* data = const_cast<void*>(index.const_data_ptr());
  const auto cells = static_cast<std::size_t>(index.numel());
  const int per_row = static_cast<int>(std::min<std::int64_t>(chunks, core::ChunkIndex::kMaxChunks + 1));
  return orValueError(op, [&] {
    if (index.scalar_type() == at::kLong) {
      return core::ChunkIndex::hashed({static_cast<std::int64_t*>(data), cells}, rows, per_row);
    }
    return cells == 0 ? core::ChunkIndex::identity(rows, per_row)
                      : core::ChunkIndex::direct({static_cast<std::int32_t*>(data), cells}, rows, per_row);
  });
}

core::ChunkUtility utilityOf(const char* op, const at::Tensor& utility, const at::Tensor& sketch, at::Device device,
                             std::int64_t slots, std::int64_t rows, std::int64_t chunks) {
  if (utility.numel() == 0) {
    return core::ChunkUtility::none();
  }
  TORCH_CHECK_VALUE(utility.is_contiguous() && sketch.is_contiguous() && utility.device() == device, op,
                    ": utility and sketch must be contiguous and on ", device);
  auto* data = const_cast<void*>(utility.const_data_ptr());
  const auto count = static_cast<std::size_t>(utility.numel());
  const std::int64_t expected = sketch.numel() > 0 ? slots + sketch.numel() : rows * chunks;
  TORCH_CHECK_VALUE(utility.numel() == expected, op, ": utility has ", utility.numel(), " elements; the table needs ",
                    expected);
  if (utility.scalar_type() == at::kFloat && sketch.numel() == 0) {
    return core::ChunkUtility::floats({static_cast<float*>(data), count});
  }
  TORCH_CHECK_TYPE(utility.scalar_type() == at::kByte, op, ": utility is ", utility.scalar_type(),
                   "; allowed are Byte, and Float without a sketch");
  auto* codes = static_cast<std::uint8_t*>(data);
  if (sketch.numel() == 0) {
    return core::ChunkUtility::bytes({codes, count});
  }
  TORCH_CHECK_TYPE(sketch.scalar_type() == at::kInt, op, ": sketch is ", sketch.scalar_type(), "; allowed is Int");
  auto* keys = static_cast<std::int32_t*>(const_cast<void*>(sketch.const_data_ptr()));
  return core::ChunkUtility::sketch({codes, count}, {keys, static_cast<std::size_t>(sketch.numel())});
}

void checkLayout(const char* op, const BagLayout& layout, at::Device device, std::int64_t rows) {
  TORCH_CHECK_VALUE(layout.mode >= 0 && layout.mode <= 2, op, ": mode is ", layout.mode,
                    "; allowed are 0 (sum), 1 (mean), 2 (max)");
  checkIntegers(op, "ids", layout.ids, device);
  const std::int64_t count = layout.ids.numel();
  TORCH_CHECK_VALUE(count < std::numeric_limits<std::int32_t>::max(), op, ": ", count,
                    " ids in one batch; at most 2^31 - 2 are supported");
  TORCH_CHECK_VALUE(layout.padding_idx >= -1 && layout.padding_idx < rows, op, ": padding_idx is ", layout.padding_idx,
                    "; allowed 0..", rows - 1, ", or -1 for none");
  if (!layout.offsets.has_value()) {
    TORCH_CHECK_VALUE(layout.bag_size >= 1 ? count % layout.bag_size == 0 : count == 0, op, ": ", count,
                      " ids do not make bags of ", layout.bag_size);
    return;
  }
  checkIntegers(op, "offsets", *layout.offsets, device);
  TORCH_CHECK_VALUE(!layout.include_last_offset || layout.offsets->numel() > 0, op,
                    ": include_last_offset is set, but offsets is empty; it needs the end of the last bag");
}

cpu::BagBatch batchOf(const char* op, const BagLayout& layout, std::int64_t rows) {
  checkLayout(op, layout, at::kCPU, rows);
  cpu::BagBatch batch;
  batch.padding = layout.padding_idx;
  batch.mode = static_cast<cpu::BagMode>(layout.mode);
  readOffsets(op, layout, layout.ids.numel(), batch.offsets);
  const auto read_ids = layout.ids.scalar_type() == at::kInt ? readIds<std::int32_t> : readIds<std::int64_t>;
  read_ids(op, layout.ids, rows, batch.ids);
  return batch;
}

void checkWeights(const char* op, const std::optional<at::Tensor>& weights, const BagLayout& layout,
                  const at::Tensor& pool) {
  if (!weights.has_value()) {
    return;
  }
  TORCH_CHECK_VALUE(layout.mode == static_cast<std::int64_t>(cpu::BagMode::kSum), op,
                    ": per_sample_weights need mode 'sum', not ", layout.mode == 1 ? "'mean'" : "'max'");
  TORCH_CHECK_VALUE(weights->sizes() == layout.ids.sizes(), op, ": per_sample_weights has shape ", weights->sizes(),
                    ", ids ", layout.ids.sizes(), "; they must be the same");
  TORCH_CHECK_TYPE(weights->scalar_type() == pool.scalar_type(), op, ": per_sample_weights is ", weights->scalar_type(),
                   ", the table ", pool.scalar_type(), "; they must be the same");
  TORCH_CHECK_VALUE(weights->device() == pool.device(), op, ": per_sample_weights is on ", weights->device(),
                    ", the table on ", pool.device());
}

void checkClock(const char* op, const at::Tensor& clock, double gamma) {
  TORCH_CHECK_VALUE(clock.numel() == 2 && clock.scalar_type() == at::kDouble && clock.device().is_cpu(), op,
                    ": clock must be two float64 on cpu, got ", clock.sizes(), " ", clock.scalar_type(), " on ",
                    clock.device());
  TORCH_CHECK_VALUE(gamma > 0 && gamma <= 1, op, ": gamma is ", gamma, "; allowed 0 < gamma <= 1");
}

}  // namespace torchext::kernels
