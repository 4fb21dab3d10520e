#include "chunk_prune.h"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <unordered_set>

#include "check.h"
#include "chunk_slots.h"

namespace torchext::core {
namespace {

// Calls visit(key, slot, utility) for every resident chunk, and for the absent ones that have collected utility.
template <class Visit>
void forEachCandidate(const ChunkIndex& index, const ChunkUtility& utility, Visit&& visit) {
  const auto resident = [&](std::int64_t key, std::int32_t slot) { visit(key, slot, utility.get(key, slot)); };
  if (utility.layout() == ChunkUtility::Layout::kSketch) {
    index.forEach(resident);
    utility.forEachCell([&](std::int64_t key, float value) { visit(key, ChunkIndex::kAbsent, value); });
    return;
  }
  if (index.layout() == ChunkIndex::Layout::kHashed) {
    // A bit a chunk costs less than a look-up each.
    std::vector<bool> held(static_cast<std::size_t>(index.keys()));
    index.forEach([&](std::int64_t key, std::int32_t slot) {
      held[static_cast<std::size_t>(key)] = true;
      resident(key, slot);
    });
    for (std::int64_t key = 0; key < index.keys(); ++key) {
      const float value = utility.get(key, ChunkIndex::kAbsent);
      if (value > 0 && !held[static_cast<std::size_t>(key)]) {
        visit(key, ChunkIndex::kAbsent, value);
      }
    }
    return;
  }
  for (std::int64_t key = 0; key < index.keys(); ++key) {
    const std::int32_t slot = index.find(key);
    const float value = utility.get(key, slot);
    if (slot >= 0 || value > 0) {
      visit(key, slot, value);
    }
  }
}

// Chunks drawn by a hash of their number in the sample: the same on all ranks.
std::vector<ChunkCandidate> sampleChunks(const ChunkIndex& index, const ChunkUtility& utility, float hysteresis) {
  constexpr std::size_t kSample = 8192;
  std::vector<ChunkCandidate> sample;
  if (static_cast<std::size_t>(index.keys()) <= 4 * kSample) {
    return sample;
  }
  sample.reserve(kSample);
  for (std::size_t i = 0; i < kSample; ++i) {
    const std::size_t key = scaleBits(mixBits(i), static_cast<std::size_t>(index.keys()));
    const std::int32_t slot = index.find(static_cast<std::int64_t>(key));
    const float value = utility.get(static_cast<std::int64_t>(key), slot);
    sample.push_back({value * (slot >= 0 ? 1 + hysteresis : 1), static_cast<std::int32_t>(key), slot});
  }
  return sample;
}

ChunkSelection select(const ChunkIndex& index, const ChunkUtility& utility, const SelectionLimits& limits) {
  const auto look = [&](const SelectionBand& band) {
    ChunkSelector selector(limits, band);
    forEachCandidate(index, utility,
                     [&](std::int64_t key, std::int32_t slot, float value) { selector.offer(key, slot, value); });
    return selector;
  };
  ChunkSelector selector =
      look(guessBand(sampleChunks(index, utility, limits.hysteresis), index.keys(), limits.capacity));
  if (!selector.settled()) {
    selector = look({});
  }
  return selector.finish();
}

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
  forEachCandidate(index, utility, [&](std::int64_t key, std::int32_t slot, float value) {
    candidates.push_back({value, static_cast<std::int32_t>(key), slot});
  });
  return candidates;
}

ChunkPrune pruneChunks(ChunkIndex& index, ChunkUtility& utility, const SelectionLimits& limits) {
  if (index.layout() == ChunkIndex::Layout::kIdentity) {
    throw std::invalid_argument("chunk prune: the table is wholly resident; there is nothing to choose");
  }
  const ChunkSelection selection = select(index, utility, limits);
  ChunkPrune plan;
  for (const ChunkCandidate& chunk : selection.admitted) {
    utility.forget(chunk.key);
  }
  for (const ChunkCandidate& chunk : selection.dropped) {
    utility.dropped(chunk.key, index.erase(chunk.key));
  }
  plan.dropped = selection.dropped;

  const auto capacity = static_cast<std::int32_t>(std::min<std::int64_t>(limits.capacity, ChunkIndex::kMaxKeys));
  std::vector<std::uint8_t> used(static_cast<std::size_t>(capacity));
  std::vector<ChunkAdmission> beyond;
  if (index.markSlots(used) > 0) {
    index.forEach([&](std::int64_t key, std::int32_t slot) {
      if (slot >= capacity) {
        beyond.push_back({static_cast<std::int32_t>(key), slot});
      }
    });
    std::sort(beyond.begin(), beyond.end(), [](const auto& a, const auto& b) { return a.key < b.key; });
  }
  ChunkSlots slots(used);
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
