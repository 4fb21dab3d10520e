#include "chunk_selection.h"

#include <algorithm>
#include <cmath>

#include "check.h"
#include "chunk_index.h"

namespace torchext::core {
namespace {

constexpr std::size_t kSample = 4096;
constexpr std::size_t kMargin = 256;  // places in the sample: 4 standard deviations of a quantile's place

using Candidates = std::vector<ChunkCandidate>;

void sortByKey(Candidates& candidates) {
  std::sort(candidates.begin(), candidates.end(),
            [](const ChunkCandidate& a, const ChunkCandidate& b) { return a.key < b.key; });
}

// Leaves the `count` most useful of these.
void keepMostUseful(Candidates& candidates, std::size_t count) {
  if (count < candidates.size()) {
    partitionMostUseful(candidates, count);
    candidates.resize(count);
  }
}

}  // namespace

void partitionMostUseful(Candidates& candidates, std::size_t count) {
  const std::size_t n = candidates.size();
  if (count == 0 || count >= n) {
    return;
  }
  auto first = candidates.begin();
  auto last = candidates.end();
  if (n > 4 * kSample) {
    Candidates sample;
    sample.reserve(kSample);
    for (std::size_t i = 0; i < kSample; ++i) {
      sample.push_back(candidates[static_cast<std::size_t>((mixBits(i) >> 32U) * n >> 32U)]);
    }
    std::sort(sample.begin(), sample.end(), isMoreUseful);
    const std::size_t place = count * kSample / n;
    const auto above = first + static_cast<std::ptrdiff_t>(count);
    if (place >= kMargin) {
      const ChunkCandidate high = sample[place - kMargin];
      const auto middle = std::partition(first, last, [&](const auto& c) { return isMoreUseful(c, high); });
      if (middle <= above) {
        first = middle;
      } else {
        last = middle;  // the guess was wrong: the threshold is above it
      }
    }
    if (place + kMargin < kSample && last == candidates.end()) {
      const ChunkCandidate low = sample[place + kMargin];
      const auto middle = std::partition(first, last, [&](const auto& c) { return isMoreUseful(c, low); });
      if (middle >= above) {
        last = middle;
      } else {
        first = middle;
      }
    }
  }
  const auto nth = candidates.begin() + static_cast<std::ptrdiff_t>(count);
  if (nth < last) {
    std::nth_element(first, nth, last, isMoreUseful);
  }
}

ChunkSelection selectChunks(Candidates candidates, const SelectionLimits& limits) {
  if (limits.capacity < 0) {
    throwInvalid("capacity", limits.capacity, "0 or more chunks");
  }
  if (limits.max_swaps < 0) {
    throwInvalid("max_swaps", limits.max_swaps, "0 or more chunks");
  }
  if (!(limits.hysteresis >= 0) || std::isinf(limits.hysteresis)) {
    throwInvalid("hysteresis", limits.hysteresis, "0 or more, finite");
  }
  std::int64_t residents = 0;
  for (ChunkCandidate& candidate : candidates) {
    if (candidate.slot >= 0) {
      candidate.utility *= 1 + limits.hysteresis;
      ++residents;
    }
  }
  const auto capacity = static_cast<std::size_t>(limits.capacity);
  partitionMostUseful(candidates, capacity);
  ChunkSelection result;
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    const bool chosen = i < capacity;
    if (chosen != (candidates[i].slot >= 0)) {
      (chosen ? result.admitted : result.dropped).push_back(candidates[i]);
    }
  }
  // Too many at once: the best enter, the worst leave, and those that must leave do in any case.
  const auto excess = static_cast<std::size_t>(std::max<std::int64_t>(0, residents - limits.capacity));
  const std::size_t most = excess + static_cast<std::size_t>(limits.max_swaps);
  if (result.dropped.size() > most) {
    partitionMostUseful(result.dropped, result.dropped.size() - most);
    result.dropped.erase(result.dropped.begin(), result.dropped.end() - static_cast<std::ptrdiff_t>(most));
  }
  const std::size_t room = capacity + result.dropped.size() - static_cast<std::size_t>(residents);
  keepMostUseful(result.admitted, room);
  sortByKey(result.dropped);
  sortByKey(result.admitted);
  for (Candidates* list : {&result.dropped, &result.admitted}) {
    for (ChunkCandidate& candidate : *list) {
      candidate.utility /= candidate.slot >= 0 ? 1 + limits.hysteresis : 1;
    }
  }
  return result;
}

}  // namespace torchext::core
