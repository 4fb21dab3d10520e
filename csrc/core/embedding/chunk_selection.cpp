#include "core/embedding/chunk_selection.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "core/base/check.h"

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

std::optional<SelectionBand> guessSwaps(const Candidates& sample, std::int64_t keys, std::int64_t residents,
                                        const SelectionLimits& limits) {
  std::vector<float> leaving;   // utilities of residents
  std::vector<float> entering;  // of absent chunks
  for (const ChunkCandidate& candidate : sample) {
    (candidate.slot >= 0 ? leaving : entering).push_back(candidate.utility);
  }
  // How many of the sample stand for `count` of `all` chunks, at most: 6 standard deviations, as kMargin.
  const auto place = [](std::int64_t count, std::int64_t all, std::size_t sampled) {
    const double expected = static_cast<double>(count) / static_cast<double>(all) * static_cast<double>(sampled);
    return static_cast<std::size_t>(std::ceil(expected + 6 * std::sqrt(expected) + 6));
  };
  const std::int64_t drops = std::max<std::int64_t>(residents - limits.capacity, 0) + limits.max_swaps;
  const std::int64_t room = limits.capacity + drops - residents;
  if (drops < 0 || drops >= residents || room < 0 || room >= keys - residents) {
    return std::nullopt;
  }
  const std::size_t worst = place(drops, residents, leaving.size());
  const std::size_t best = place(room, keys - residents, entering.size());
  if (worst >= leaving.size() || best >= entering.size()) {
    return std::nullopt;
  }
  const auto at = [](std::vector<float>& from, std::size_t rank) {
    std::nth_element(from.begin(), from.begin() + static_cast<std::ptrdiff_t>(rank), from.end());
    return from[rank];
  };
  SelectionBand band{.swaps_are_outside = true};
  band.low.utility = at(leaving, worst);
  band.high.utility = at(entering, entering.size() - 1 - best);
  return band.low.utility <= band.high.utility ? std::optional(band) : std::nullopt;
}

ChunkSelector::ChunkSelector(const SelectionLimits& limits, const SelectionBand& band)
    : limits_(limits),
      band_(band),
      rules_{1 + limits.hysteresis, band.high.utility, band.low.utility, band.swaps_are_outside ? 0 : -1} {
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

void ChunkSelector::offerAll(std::span<const std::int32_t> slots, std::span<const float> utilities) {
  constexpr std::size_t kBlock = 64;
  std::array<std::int32_t, kBlock> kept{};
  std::array<std::uint8_t, kBlock> found{};
  const Rules rules = rules_;  // not written in the loop, as far as a compiler knows
  for (std::size_t begin = 0; begin < slots.size(); begin += kBlock) {
    const std::size_t count = std::min(kBlock, slots.size() - begin);
    const std::int32_t* const slot = slots.data() + begin;
    const float* const utility = utilities.data() + begin;
    std::int32_t residents = 0;
    std::int32_t above = 0;
    std::int32_t below = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const Selection selection = rules.judge(slot[i], utility[i]);
      const std::int32_t offered = selection.resident | (utility[i] > 0 ? -1 : 0);
      residents -= selection.resident;
      above -= selection.over & offered;
      below -= selection.under & offered;
      kept[i] = selection.kept & offered;
    }
    residents_ += static_cast<std::size_t>(residents);
    above_ += static_cast<std::size_t>(above);
    below_ += static_cast<std::size_t>(below);
    std::size_t hits = 0;
    for (std::size_t i = 0; i < count; ++i) {
      found[hits] = static_cast<std::uint8_t>(i);
      hits += static_cast<std::size_t>(-kept[i]);
    }
    for (std::size_t i = 0; i < hits; ++i) {
      keep(static_cast<std::int64_t>(begin + found[i]), slot[found[i]], utility[found[i]]);
    }
  }
}

void ChunkSelector::keep(std::int64_t key, std::int32_t slot, float utility) {
  const ChunkCandidate candidate{rules_.counted(slot, utility), static_cast<std::int32_t>(key), slot};
  bool over = candidate.utility > band_.high.utility;
  bool under = candidate.utility < band_.low.utility;
  if (!over && !under) {
    // As useful as one end of the band, or between the two.
    over = isMoreUseful(candidate, band_.high);
    under = !over && isMoreUseful(band_.low, candidate);
    above_ += over ? 1 : 0;
    below_ += under ? 1 : 0;
  }
  const bool resident = slot >= 0;
  if (!over && !under) {
    between_.push_back(candidate);
  } else if (over != resident) {
    (over ? selection_.admitted : selection_.dropped).push_back(candidate);
  }
}

std::size_t ChunkSelector::mostDrops() const {
  const auto capacity = static_cast<std::size_t>(limits_.capacity);
  const std::size_t forced = residents_ > capacity ? residents_ - capacity : 0;
  return forced + static_cast<std::size_t>(limits_.max_swaps);
}

bool ChunkSelector::settled() const {
  if (band_.swaps_are_outside) {
    // If fewer than mostDrops() left, one of these residents would stay while one of these absent chunks, all of which
    // are more useful, had to stay out.
    const std::size_t most = mostDrops();
    return selection_.dropped.size() >= most && selection_.admitted.size() >= room(most);
  }
  const auto capacity = static_cast<std::size_t>(limits_.capacity);
  return above_ <= capacity && (above_ + between_.size() >= capacity || below_ == 0);
}

ChunkSelection ChunkSelector::finish() {
  auto& [dropped, admitted] = selection_;
  const std::size_t sure_drops = dropped.size();
  const std::size_t sure_admissions = admitted.size();
  if (!between_.empty()) {
    const std::size_t places = static_cast<std::size_t>(limits_.capacity) - above_;
    forEachByUse(between_, places, [&](const ChunkCandidate& candidate, bool enters) {
      if (enters != (candidate.slot >= 0)) {
        (enters ? selection_.admitted : selection_.dropped).push_back(candidate);
      }
    });
  }
  sortByKey(dropped, sure_drops);
  sortByKey(admitted, sure_admissions);
  // Too many at once: the best enter, the worst leave, and those that must leave do in any case.
  if (dropped.size() > mostDrops()) {
    dropped = filterByUse(dropped, dropped.size() - mostDrops(), false);
  }
  if (admitted.size() > room(dropped.size())) {
    admitted = filterByUse(admitted, room(dropped.size()), true);
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
