#include "chunk_selection.h"

#include <algorithm>
#include <cmath>

#include "check.h"

namespace torchext::core {
namespace {

// Places in the sample by which the threshold may be off: 5.6 standard deviations of a quantile's place in a sample of
// 8192.
constexpr std::size_t kMargin = 256;

using Candidates = std::vector<ChunkCandidate>;

bool hasSmallerKey(const ChunkCandidate& a, const ChunkCandidate& b) { return a.key < b.key; }

// Sorts a list whose first `middle` and other candidates are sorted already where candidates were offered in order.
void sortByKey(Candidates& list, std::size_t middle) {
  const auto split = list.begin() + static_cast<std::ptrdiff_t>(middle);
  if (std::is_sorted(list.begin(), split, hasSmallerKey) && std::is_sorted(split, list.end(), hasSmallerKey)) {
    std::inplace_merge(list.begin(), split, list.end(), hasSmallerKey);
  } else {
    std::sort(list.begin(), list.end(), hasSmallerKey);
  }
}

// Calls visit(candidate, whether it is one of the `count` most useful) for each, in their order.
template <class Visit>
void forEachByUse(const Candidates& list, std::size_t count, Visit&& visit) {
  if (count >= list.size()) {
    for (const ChunkCandidate& candidate : list) {
      visit(candidate, true);
    }
    return;
  }
  Candidates ranked = list;
  const auto first_out = ranked.begin() + static_cast<std::ptrdiff_t>(count);
  std::nth_element(ranked.begin(), first_out, ranked.end(),
                   [](const ChunkCandidate& a, const ChunkCandidate& b) { return isMoreUseful(a, b); });
  for (const ChunkCandidate& candidate : list) {
    visit(candidate, isMoreUseful(candidate, *first_out));
  }
}

// Leaves the `count` most useful, or the others, in their order.
Candidates filterByUse(const Candidates& list, std::size_t count, bool most_useful) {
  Candidates kept;
  forEachByUse(list, count, [&](const ChunkCandidate& candidate, bool useful) {
    if (useful == most_useful) {
      kept.push_back(candidate);
    }
  });
  return kept;
}

}  // namespace

SelectionBand guessBand(Candidates sample, std::int64_t keys, std::int64_t capacity) {
  SelectionBand band;
  if (sample.size() <= 2 * kMargin || keys <= 0) {
    return band;
  }
  std::sort(sample.begin(), sample.end(), isMoreUseful);
  const double share = static_cast<double>(capacity) / static_cast<double>(keys);
  const auto place = static_cast<std::size_t>(share * static_cast<double>(sample.size()));
  if (place >= kMargin && place < sample.size() + kMargin) {
    band.high = sample[place - kMargin];
  }
  if (place + kMargin < sample.size()) {
    band.low = sample[place + kMargin];
  }
  return band;
}

ChunkSelector::ChunkSelector(const SelectionLimits& limits, const SelectionBand& band) : limits_(limits), band_(band) {
  if (limits.capacity < 0) {
    throwInvalid("capacity", limits.capacity, "0 or more chunks");
  }
  if (limits.max_swaps < 0) {
    throwInvalid("max_swaps", limits.max_swaps, "0 or more chunks");
  }
  if (!(limits.hysteresis >= 0) || std::isinf(limits.hysteresis)) {
    throwInvalid("hysteresis", limits.hysteresis, "0 or more, finite");
  }
}

void ChunkSelector::keep(const ChunkCandidate& candidate, bool over, bool under) {
  if (!over && !under) {
    // As useful as one end of the band, or between the two.
    over = isMoreUseful(candidate, band_.high);
    under = !over && isMoreUseful(band_.low, candidate);
    above_ += over ? 1 : 0;
    below_ += under ? 1 : 0;
  }
  const bool resident = candidate.slot >= 0;
  if (!over && !under) {
    between_.push_back(candidate);
  } else if (over != resident) {
    (over ? selection_.admitted : selection_.dropped).push_back(candidate);
  }
}

bool ChunkSelector::settled() const {
  const auto capacity = static_cast<std::size_t>(limits_.capacity);
  return above_ <= capacity && (above_ + between_.size() >= capacity || below_ == 0);
}

ChunkSelection ChunkSelector::finish() {
  const auto capacity = static_cast<std::size_t>(limits_.capacity);
  auto& [dropped, admitted] = selection_;
  const std::size_t sure_drops = dropped.size();
  const std::size_t sure_admissions = admitted.size();
  forEachByUse(between_, capacity - above_, [&](const ChunkCandidate& candidate, bool enters) {
    if (enters != (candidate.slot >= 0)) {
      (enters ? selection_.admitted : selection_.dropped).push_back(candidate);
    }
  });
  sortByKey(dropped, sure_drops);
  sortByKey(admitted, sure_admissions);
  // Too many at once: the best enter, the worst leave, and those that must leave do in any case.
  const std::size_t excess = residents_ > capacity ? residents_ - capacity : 0;
  const std::size_t most = excess + static_cast<std::size_t>(limits_.max_swaps);
  if (dropped.size() > most) {
    dropped = filterByUse(dropped, dropped.size() - most, false);
  }
  const std::size_t room = capacity + dropped.size() - residents_;
  if (admitted.size() > room) {
    admitted = filterByUse(admitted, room, true);
  }
  for (ChunkCandidate& candidate : dropped) {
    candidate.utility /= 1 + limits_.hysteresis;
  }
  return std::move(selection_);
}

ChunkSelection selectChunks(const Candidates& candidates, const SelectionLimits& limits) {
  ChunkSelector selector(limits, {});
  for (const ChunkCandidate& candidate : candidates) {
    selector.offer(candidate.key, candidate.slot, candidate.utility);
  }
  return selector.finish();
}

}  // namespace torchext::core
