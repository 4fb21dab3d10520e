// The operators on a table between steps: pruning, contents carried to their new slots, a list of its chunks, norms
// brought down, huge pages.
#include <cmath>
#include <cstring>

#include <ATen/ops/empty.h>
#include <torch/library.h>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "csrc/core/embedding/chunk_prune.h"
#include "kernels/adaptive_bag.h"
#include "kernels/bag_dispatch.h"
#include "kernels/cpu/bag_groups.h"
#include "kernels/cpu/bag_loops.h"
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

// The numbers of a list of pairs, of which those in columns `first_slot` and after are slots.
std::span<const std::int64_t> pairsOf(const char* op, const char* name, const at::Tensor& list, std::int64_t first_slot,
                                      std::int64_t slots) {
  TORCH_CHECK_VALUE(list.dim() == 2 && list.size(1) == 2 && list.is_contiguous() && list.device().is_cpu(), op, ": ",
                    name, " must be contiguous, n x 2, on cpu; got ", list.sizes(), " on ", list.device());
  TORCH_CHECK_TYPE(list.scalar_type() == at::kLong, op, ": ", name, " is ", list.scalar_type(), "; it must be Long");
  const std::span pairs(list.const_data_ptr<std::int64_t>(), static_cast<std::size_t>(list.numel()));
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    const bool is_slot = static_cast<std::int64_t>(i % 2) >= first_slot;
    TORCH_CHECK_INDEX(!is_slot || (pairs[i] >= 0 && pairs[i] < slots), op, ": ", name, "[", i / 2, "] has slot ",
                      pairs[i], "; allowed 0..", slots - 1);
  }
  return pairs;
}

// Every move, then zeros where chunks were admitted. In place, because a pruning lists moves in an order that allows
// it.
void carry(const at::Tensor& values, const at::Tensor& moves, const at::Tensor& admitted) {
  constexpr const char* kOp = "adaptive_table_carry_";
  constexpr std::size_t kAhead = 16;  // slots lie anywhere: ask for them before they are needed
  TORCH_CHECK_VALUE(values.dim() >= 1 && values.is_contiguous(), kOp, ": values must be contiguous, a slot a row; got ",
                    values.sizes());
  const std::span<const std::int64_t> moved = pairsOf(kOp, "moves", moves, 0, values.size(0));
  const std::span<const std::int64_t> added = pairsOf(kOp, "admitted", admitted, 1, values.size(0));
  const std::size_t bytes = values.size(0) > 0 ? values.nbytes() / static_cast<std::size_t>(values.size(0)) : 0;
  auto* const memory = static_cast<char*>(values.mutable_data_ptr());
  const auto at = [=](std::int64_t slot) { return memory + static_cast<std::size_t>(slot) * bytes; };
  for (std::size_t i = 0; i < moved.size(); i += 2) {
    if (i + 2 * kAhead < moved.size()) {
      cpu::prefetchRange(at(moved[i + 2 * kAhead]), bytes);
      cpu::prefetchRange(at(moved[i + 2 * kAhead + 1]), bytes);
    }
    std::memcpy(at(moved[i + 1]), at(moved[i]), bytes);
  }
  for (std::size_t i = 0; i < added.size(); i += 2) {
    if (i + 2 * kAhead < added.size()) {
      cpu::prefetchRange(at(added[i + 2 * kAhead + 1]), bytes);
    }
    std::memset(at(added[i + 1]), 0, bytes);
  }
}

// The slots of admitted chunks (by rising key) whose rows were never seen before; the rows are from now on.
at::Tensor meet(const at::Tensor& seen, const at::Tensor& admitted, std::int64_t chunks) {
  constexpr const char* kOp = "adaptive_table_meet_";
  TORCH_CHECK_VALUE(chunks >= 1, kOp, ": chunks is ", chunks, "; it must be 1 or more");
  TORCH_CHECK_VALUE(seen.scalar_type() == at::kByte && seen.dim() == 1 && seen.is_contiguous(), kOp,
                    ": seen must be bytes, 1-D and contiguous; got ", seen.scalar_type(), " ", seen.sizes());
  const std::span<const std::int64_t> added = pairsOf(kOp, "admitted", admitted, 2, 0);
  const std::int64_t keys = 8 * seen.numel() * chunks;
  for (std::size_t i = 0; i < added.size(); i += 2) {
    TORCH_CHECK_INDEX(added[i] >= 0 && added[i] < keys, kOp, ": admitted[", i / 2, "] has key ", added[i],
                      "; allowed 0..", keys - 1);
  }
  auto* const bits = seen.mutable_data_ptr<std::uint8_t>();
  std::vector<std::int64_t> slots;
  std::int64_t row_end = -1;  // the first key behind the row
  bool is_new = false;
  for (std::size_t i = 0; i < added.size(); i += 2) {
    if (added[i] >= row_end) {  // keys rise
      const std::int64_t row = added[i] / chunks;
      row_end = (row + 1) * chunks;
      std::uint8_t& byte = bits[row / 8];
      const auto bit = static_cast<std::uint8_t>(1U << static_cast<unsigned>(row % 8));
      is_new = (byte & bit) == 0;
      byte |= bit;
    }
    if (is_new) {
      slots.push_back(added[i + 1]);
    }
  }
  at::Tensor fresh = at::empty({static_cast<std::int64_t>(slots.size())}, at::kLong);
  std::copy(slots.begin(), slots.end(), fresh.mutable_data_ptr<std::int64_t>());
  return fresh;
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
  m.impl("adaptive_table_carry_", torchext::kernels::carry);
  m.impl("adaptive_table_meet_", torchext::kernels::meet);
  m.impl("adaptive_table_candidates", torchext::kernels::candidates);
  m.impl("adaptive_bag_renorm_", torchext::kernels::renorm);
  m.impl("adaptive_table_advise_huge_pages", torchext::kernels::adviseHugePages);
}
