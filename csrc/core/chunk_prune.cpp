#include "chunk_prune.h"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <unordered_set>

#include "check.h"
#include "chunk_slots.h"

namespace torchext::core {
namespace {

class Placement {
 public:
  Placement(ChunkIndex& index, ChunkUtility& utility, ChunkSlots& slots, ChunkPrune& plan)
      : index_(index), utility_(utility), slots_(slots), plan_(plan) {}

  void move(std::int64_t key, std::int32_t to) {
    const std::int32_t from = index_.erase(key);
    index_.insert(key, to);
    utility_.moved(from, to);
    plan_.moves.push_back({from, to});
    moved_rows_.insert(key / index_.chunks());
    if (from < slots_.count()) {
      slots_.release(from);
    }
  }

  // The new chunks of one row, by rising key.
  void admit(const ChunkCandidate* begin, const ChunkCandidate* end) {
    const std::int64_t row = begin->key / index_.chunks();
    std::array<std::int32_t, ChunkIndex::kMaxChunks> old;  // NOLINT(*-member-init): findRow fills what is read
    const int resident = index_.findRow(row, old.data());
    const auto added = static_cast<std::int32_t>(end - begin);
    // A chunk moves once at most, so that moves can be copied from the pool as it was.
    const bool together = resident > 0 && moved_rows_.count(row) == 0 && slots_.hasRun(added + resident);
    const auto places = slots_.allocate(together ? added + resident : added);
    auto place = places.begin();
    for (int chunk = 0; chunk < index_.chunks(); ++chunk) {
      const std::int64_t key = row * index_.chunks() + chunk;
      if (begin != end && begin->key == key) {
        index_.insert(key, *place);
        utility_.admitted(*place, begin->utility);
        plan_.admitted.push_back({begin->key, *place++});
        ++begin;
      } else if (together && old[static_cast<std::size_t>(chunk)] != ChunkIndex::kAbsent) {
        move(key, *place++);
      }
    }
  }

 private:
  ChunkIndex& index_;
  ChunkUtility& utility_;
  ChunkSlots& slots_;
  ChunkPrune& plan_;
  std::unordered_set<std::int64_t> moved_rows_;
};

}  // namespace

std::vector<ChunkCandidate> chunkCandidates(const ChunkIndex& index, const ChunkUtility& utility) {
  std::vector<ChunkCandidate> candidates;
  index.forEach([&](std::int64_t key, std::int32_t slot) {
    candidates.push_back({utility.get(key, slot), static_cast<std::int32_t>(key), slot});
  });
  utility.forEachAbsent(index, [&](std::int64_t key, float value) {
    candidates.push_back({value, static_cast<std::int32_t>(key), ChunkIndex::kAbsent});
  });
  return candidates;
}

ChunkPrune pruneChunks(ChunkIndex& index, ChunkUtility& utility, const SelectionLimits& limits) {
  if (index.layout() == ChunkIndex::Layout::kIdentity) {
    throw std::invalid_argument("chunk prune: the table is wholly resident; there is nothing to choose");
  }
  const ChunkSelection selection = selectChunks(chunkCandidates(index, utility), limits);
  ChunkPrune plan;
  for (const ChunkCandidate& chunk : selection.admitted) {
    utility.forget(chunk.key);
  }
  for (const ChunkCandidate& chunk : selection.dropped) {
    utility.dropped(chunk.key, index.erase(chunk.key));
  }
  plan.dropped = selection.dropped;

  const auto capacity = static_cast<std::int32_t>(std::min<std::int64_t>(limits.capacity, ChunkIndex::kMaxKeys));
  std::vector<std::int32_t> taken;
  std::vector<ChunkAdmission> beyond;
  index.forEach([&](std::int64_t key, std::int32_t slot) {
    if (slot < capacity) {
      taken.push_back(slot);
    } else {
      beyond.push_back({static_cast<std::int32_t>(key), slot});
    }
  });
  std::sort(beyond.begin(), beyond.end(), [](const auto& a, const auto& b) { return a.key < b.key; });
  ChunkSlots slots(capacity, taken);
  Placement placement(index, utility, slots, plan);
  for (const ChunkAdmission& chunk : beyond) {
    placement.move(chunk.key, slots.allocate(1).front());
  }
  const ChunkCandidate* at = selection.admitted.data();
  const ChunkCandidate* const end = at + selection.admitted.size();
  while (at != end) {
    const std::int64_t row = at->key / index.chunks();
    const ChunkCandidate* next = at;
    while (next != end && next->key / index.chunks() == row) {
      ++next;
    }
    placement.admit(at, next);
    at = next;
  }
  return plan;
}

}  // namespace torchext::core
