#include "core/embedding/chunk_prune.h"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <unordered_set>

#include "core/base/check.h"
#include "core/embedding/chunk_slots.h"

namespace torchext::core {
namespace {

// A hash and a sketch store keys, which may be another table's; utilities and marks are only as many as this one has.
void checkKey(const ChunkIndex& index, std::int64_t key) {
  if (key < 0 || key >= index.keys()) {
    throw std::out_of_range(concat("chunk prune: a stored key is ", key, ": allowed 0..", index.keys() - 1,
                                   "; index or sketch are another table's"));
  }
}

// Calls visit(key, slot, utility) for every resident chunk, and for the absent ones that have collected utility.
template <class Visit>
void forEachCandidate(const ChunkIndex& index, const ChunkUtility& utility, Visit&& visit) {
  const auto resident = [&](std::int64_t key, std::int32_t slot) {
    checkKey(index, key);
    visit(key, slot, utility.get(key, slot));
  };
  if (utility.layout() == ChunkUtility::Layout::kSketch) {
    index.forEach(resident);
    utility.forEachCell([&](std::int64_t key, float value) {
      checkKey(index, key);
      visit(key, ChunkIndex::kAbsent, value);
    });
    return;
  }
  if (index.layout() == ChunkIndex::Layout::kHashed) {
    // A bit a chunk costs less than a look-up each.
    std::vector<bool> held(static_cast<std::size_t>(index.keys()));
    index.forEach([&](std::int64_t key, std::int32_t slot) {
      resident(key, slot);
      held[static_cast<std::size_t>(key)] = true;
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

ChunkSelection select(const ChunkIndex& index, const ChunkUtility& utility, const SelectionLimits& limits,
                      std::int64_t residents) {
  const auto look = [&](const SelectionBand& band) {
    ChunkSelector selector(limits, band);
    if (index.layout() == ChunkIndex::Layout::kDirect && utility.layout() == ChunkUtility::Layout::kFloats) {
      selector.offerAll(index.directCells(), utility.floatValues());
      return selector;
    }
    forEachCandidate(index, utility,
                     [&](std::int64_t key, std::int32_t slot, float value) { selector.offer(key, slot, value); });
    return selector;
  };
  std::vector<ChunkCandidate> sample = sampleChunks(index, utility, limits.hysteresis);
  if (const auto swaps = guessSwaps(sample, index.keys(), residents, limits)) {
    ChunkSelector selector = look(*swaps);
    if (selector.settled()) {
      return selector.finish();
    }
  }
  ChunkSelector selector = look(guessBand(std::move(sample), index.keys(), limits.capacity));
  if (!selector.settled()) {
    selector = look({});
  }
  return selector.finish();
}

class Placement {
 public:
  Placement(ChunkIndex& index, ChunkUtility& utility, ChunkSlots& slots, ChunkPrune& plan)
      : index_(index), utility_(utility), slots_(slots), plan_(plan) {}

  // Out of a slot beyond the new end of the pool, before any row grows.
  void bringIn(std::int64_t key) {
    moved_rows_.insert(key / index_.chunks());
    move(key, slots_.allocate(1).front());
  }

  // The new chunks of one row, by rising key.
  void admit(std::int64_t row, const ChunkCandidate* begin, const ChunkCandidate* end) {
    std::array<std::int32_t, ChunkIndex::kMaxChunks> old;  // NOLINT(*-member-init): findRow fills what is read
    const int resident = index_.findRow(row, old.data());
    const auto added = static_cast<std::int32_t>(end - begin);
    // A chunk moves once at most: what was brought in stays.
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
  void move(std::int64_t key, std::int32_t to) {
    const std::int32_t from = index_.erase(key);
    index_.insert(key, to);
    utility_.moved(from, to);
    plan_.moves.push_back({from, to});
    if (from < slots_.count()) {
      slots_.release(from);
    }
  }

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
  const auto capacity = static_cast<std::int32_t>(std::clamp<std::int64_t>(limits.capacity, 0, ChunkIndex::kMaxKeys));
  std::vector<std::uint8_t> used(static_cast<std::size_t>(capacity));
  const ChunkIndex::Residents residents = index.markSlots(used);
  ChunkSelection selection = select(index, utility, limits, residents.all);
  ChunkPrune plan;
  for (const ChunkCandidate& chunk : selection.admitted) {
    utility.forget(chunk.key);
  }
  for (const ChunkCandidate& chunk : selection.dropped) {
    utility.dropped(chunk.key, index.erase(chunk.key));
    if (chunk.slot < capacity) {
      used[static_cast<std::size_t>(chunk.slot)] = 0;
    }
  }
  plan.dropped = std::move(selection.dropped);

  std::vector<ChunkAdmission> beyond;
  if (residents.beyond > 0) {
    index.forEach([&](std::int64_t key, std::int32_t slot) {
      if (slot >= capacity) {
        beyond.push_back({static_cast<std::int32_t>(key), slot});
      }
    });
    std::sort(beyond.begin(), beyond.end(), [](const auto& a, const auto& b) { return a.key < b.key; });
  }
  ChunkSlots slots(used);
  plan.admitted.reserve(selection.admitted.size());
  Placement placement(index, utility, slots, plan);
  for (const ChunkAdmission& chunk : beyond) {
    placement.bringIn(chunk.key);
  }
  const ChunkCandidate* at = selection.admitted.data();
  const ChunkCandidate* const end = at + selection.admitted.size();
  while (at != end) {
    const std::int64_t row = at->key / index.chunks();
    const ChunkCandidate* next = at;
    while (next != end && next->key < (row + 1) * index.chunks()) {
      ++next;
    }
    placement.admit(row, at, next);
    at = next;
  }
  return plan;
}

}  // namespace torchext::core
