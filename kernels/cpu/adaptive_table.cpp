// What happens to a table between steps: pruning, a list of its chunks, norms brought down, huge pages.
#include <cmath>

#include <ATen/ops/empty.h>
#include <torch/library.h>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "csrc/core/chunk_prune.h"
#include "kernels/adaptive_bag.h"
#include "kernels/bag_dispatch.h"
#include "kernels/cpu/bag_groups.h"
#include "kernels/cpu/element.h"

namespace torchext::kernels {

namespace {

at::Tensor pairs(std::size_t count) { return at::empty({static_cast<std::int64_t>(count), 2}, at::kLong); }

std::tuple<at::Tensor, at::Tensor, at::Tensor> prune(const at::Tensor& index, const at::Tensor& utility,
                                                     const at::Tensor& sketch, std::int64_t slots, std::int64_t rows,
                                                     std::int64_t chunks, std::int64_t capacity, std::int64_t max_swaps,
                                                     double hysteresis) {
  constexpr const char* kOp = "adaptive_table_prune_";
  core::ChunkIndex table = indexOf(kOp, index, at::kCPU, rows, chunks);
  core::ChunkUtility worth = utilityOf(kOp, utility, sketch, at::kCPU, slots, rows, chunks);
  TORCH_CHECK_VALUE(table.layout() != core::ChunkIndex::Layout::kIdentity, kOp,
                    ": the table is wholly resident; there is nothing to prune");
  TORCH_CHECK_VALUE(capacity >= 0 && max_swaps >= 0 && hysteresis >= 0, kOp, ": capacity ", capacity, ", max_swaps ",
                    max_swaps, " and hysteresis ", hysteresis, " must be 0 or more");
  const bool hashed = table.layout() == core::ChunkIndex::Layout::kHashed;
  TORCH_CHECK_VALUE(!hashed || core::ChunkIndex::cellsFor(static_cast<std::size_t>(capacity)) <=
                                   static_cast<std::size_t>(index.numel()),
                    kOp, ": the index has ", index.numel(), " cells, too few for ", capacity, " chunks");
  const core::ChunkPrune plan = core::pruneChunks(table, worth, {capacity, max_swaps, static_cast<float>(hysteresis)});
  at::Tensor moves = pairs(plan.moves.size());
  at::Tensor admitted = pairs(plan.admitted.size());
  at::Tensor dropped = pairs(plan.dropped.size());
  auto* to = moves.mutable_data_ptr<std::int64_t>();
  for (const core::ChunkMove& move : plan.moves) {
    *to++ = move.from;
    *to++ = move.to;
  }
  to = admitted.mutable_data_ptr<std::int64_t>();
  for (const core::ChunkAdmission& chunk : plan.admitted) {
    *to++ = chunk.key;
    *to++ = chunk.slot;
  }
  to = dropped.mutable_data_ptr<std::int64_t>();
  for (const core::ChunkCandidate& chunk : plan.dropped) {
    *to++ = chunk.key;
    *to++ = chunk.slot;
  }
  return {moves, admitted, dropped};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> candidates(const at::Tensor& index, const at::Tensor& utility,
                                                          const at::Tensor& sketch, std::int64_t slots,
                                                          std::int64_t rows, std::int64_t chunks) {
  constexpr const char* kOp = "adaptive_table_candidates";
  const core::ChunkIndex table = indexOf(kOp, index, at::kCPU, rows, chunks);
  const core::ChunkUtility worth = utilityOf(kOp, utility, sketch, at::kCPU, slots, rows, chunks);
  std::vector<core::ChunkCandidate> found = core::chunkCandidates(table, worth);
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.key < b.key; });
  const auto count = static_cast<std::int64_t>(found.size());
  at::Tensor keys = at::empty({count}, at::kLong);
  at::Tensor places = at::empty({count}, at::kLong);
  at::Tensor utilities = at::empty({count}, at::kFloat);
  auto* key = keys.mutable_data_ptr<std::int64_t>();
  auto* place = places.mutable_data_ptr<std::int64_t>();
  auto* value = utilities.mutable_data_ptr<float>();
  for (const core::ChunkCandidate& chunk : found) {
    *key++ = chunk.key;
    *place++ = chunk.slot;
    *value++ = chunk.utility;
  }
  return {keys, places, utilities};
}

// torch's embedding_renorm_: rows whose norm exceeds max_norm are scaled by max_norm / (norm + 1e-7).
void renorm(const at::Tensor& pool, const at::Tensor& index, const at::Tensor& ids, std::int64_t rows,
            std::int64_t chunks, double max_norm, double norm_type) {
  constexpr const char* kOp = "adaptive_bag_renorm_";
  TORCH_CHECK_VALUE(norm_type > 0, kOp, ": norm_type is ", norm_type, "; allowed: above 0");
  checkTable(kOp, pool, index, rows, chunks);
  const core::ChunkIndex table = indexOf(kOp, index, at::kCPU, rows, chunks);
  const std::optional<at::Tensor> none;
  const cpu::BagBatch batch = batchOf(kOp, {ids, none, 1, false, 0, -1}, rows);
  const cpu::GroupedIds distinct = cpu::groupIds(batch, rows);
  std::vector<std::int32_t> slots(static_cast<std::size_t>(chunks));
  const std::int64_t width = pool.size(1);
  TORCHEXT_DISPATCH_POOL(pool.scalar_type(), [&] {
    using E = cpu::Element<scalar_t>;
    auto* values = pool.mutable_data_ptr<scalar_t>();
    const auto for_each_value = [&](auto&& visit) {
      for (const std::int32_t slot : slots) {
        for (std::int64_t i = 0; slot >= 0 && i < width; ++i) {
          visit(values[slot * width + i]);
        }
      }
    };
    for (std::size_t group = 0; group < distinct.groups(); ++group) {
      table.findRow(distinct.idOf(group), slots.data());
      double sum = 0;
      double largest = 0;
      for_each_value([&](scalar_t stored) {
        const double value = std::abs(static_cast<double>(E::load(stored)));
        sum += norm_type == 2 ? value * value : norm_type == 1 ? value : std::pow(value, norm_type);
        largest = std::max(largest, value);
      });
      const double norm = std::isinf(norm_type) ? largest
                          : norm_type == 2      ? std::sqrt(sum)
                                                : std::pow(sum, 1 / norm_type);
      if (norm > max_norm) {
        const auto factor = static_cast<typename E::Math>(max_norm / (norm + 1e-7));
        for_each_value([&](scalar_t& stored) { stored = E::store(E::load(stored) * factor); });
      }
    }
  });
}

// Random rows of a large pool miss the TLB with 4 KiB pages; asking for 2 MiB ones costs nothing where they are not to
// be had. Call it before the memory is first written.
bool adviseHugePages(const at::Tensor& pool) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr std::uintptr_t kPage = std::uintptr_t{1} << 21U;
  const auto begin = reinterpret_cast<std::uintptr_t>(pool.const_data_ptr());
  const std::uintptr_t first = (begin + kPage - 1) / kPage * kPage;
  const std::uintptr_t last = (begin + pool.nbytes()) / kPage * kPage;
  if (first < last) {
    // NOLINTNEXTLINE(performance-no-int-to-ptr): whole pages inside the tensor
    return madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE) == 0;
  }
#endif
  return false;
}

}  // namespace

}  // namespace torchext::kernels

TORCH_LIBRARY_IMPL(torchext, CPU, m) {
  m.impl("adaptive_table_prune_", torchext::kernels::prune);
  m.impl("adaptive_table_candidates", torchext::kernels::candidates);
  m.impl("adaptive_bag_renorm_", torchext::kernels::renorm);
  m.impl("adaptive_table_advise_huge_pages", torchext::kernels::adviseHugePages);
}
