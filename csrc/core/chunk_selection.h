// Who stays and who enters when an embedding table is pruned (FIITED, section 3.2).
//
// The `capacity` most useful chunks of all, resident or not, are to be resident afterwards. Order: utility; where equal
// residents first (nothing moves without a gain), then the smaller key. That is a total order: the answer is the same
// on all ranks and for every order of the candidates.
//
// Millions of candidates are looked at once, and most of them only compared with two numbers: a sample says between
// which two the threshold must be, and only what changes places, and the narrow band between those two, is kept. The
// band is settled exactly afterwards; where the sample was misleading, everything is looked at again without it. The
// result is always exact.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace torchext::core {

struct ChunkCandidate {
  float utility = 0;
  std::int32_t key = 0;
  std::int32_t slot = -1;  // -1: absent

  bool operator==(const ChunkCandidate&) const = default;
};

struct ChunkSelection {
  std::vector<ChunkCandidate> dropped;   // residents that leave, by rising key
  std::vector<ChunkCandidate> admitted;  // absent ones that enter, by rising key; never more than there is room for
};

struct SelectionLimits {
  std::int64_t capacity = 0;  // chunks that may be resident afterwards
  // Drops beyond those that capacity forces: at most so many chunks are exchanged at once, the most useful absent ones
  // against the least useful residents.
  std::int64_t max_swaps = 0;
  // A resident counts (1 + hysteresis) times its utility, so that near equals do not change places for ever.
  float hysteresis = 0;
};

// Whether a stands before b in the order above.
inline bool isMoreUseful(const ChunkCandidate& a, const ChunkCandidate& b) {
  if (a.utility != b.utility) {
    return a.utility > b.utility;
  }
  const bool a_stays = a.slot >= 0;
  return a_stays != (b.slot >= 0) ? a_stays : a.key < b.key;
}

// Two candidates between which, or on one of which, the threshold is believed to be. Without a sample: all that is.
struct SelectionBand {
  ChunkCandidate high{std::numeric_limits<float>::infinity(), std::numeric_limits<std::int32_t>::min(), 0};
  ChunkCandidate low{-1, std::numeric_limits<std::int32_t>::max(), -1};
};

// The band, with an error of at most about one in a million, from `sample`: of `keys` chunks, absent ones without
// utility among them, each as likely as the others; residents' utility as it counts. Small samples say nothing.
SelectionBand guessBand(std::vector<ChunkCandidate> sample, std::int64_t keys, std::int64_t capacity);

// One look at all candidates: offer() each once, then settled(), then finish().
class ChunkSelector {
 public:
  // std::invalid_argument when capacity or max_swaps is negative or hysteresis is not 0 or more.
  ChunkSelector(const SelectionLimits& limits, const SelectionBand& band);

  // Every resident, and the absent ones that may enter (utility above 0); as they are, without hysteresis.
  void offer(std::int64_t key, std::int32_t slot, float utility) {
    const bool resident = slot >= 0;
    utility *= resident ? 1 + limits_.hysteresis : 1;
    const bool over = utility > band_.high.utility;
    const bool under = utility < band_.low.utility;
    residents_ += resident ? 1 : 0;
    above_ += over ? 1 : 0;
    below_ += under ? 1 : 0;
    // No change of places, as with most: the only branch, and one that is easily predicted.
    if (static_cast<int>(over) + static_cast<int>(under) == 1 && over == resident) {
      return;
    }
    keep({utility, static_cast<std::int32_t>(key), slot}, over, under);
  }

  // Whether the band was right. If not, nothing can be said: begin again, with SelectionBand{}.
  bool settled() const;
  // The answer; once.
  ChunkSelection finish();

 private:
  void keep(const ChunkCandidate& candidate, bool over, bool under);

  SelectionLimits limits_;
  SelectionBand band_;
  std::size_t residents_ = 0;
  std::size_t above_ = 0;
  std::size_t below_ = 0;
  std::vector<ChunkCandidate> between_;
  ChunkSelection selection_;
};

// The same for candidates that exist as a list.
ChunkSelection selectChunks(const std::vector<ChunkCandidate>& candidates, const SelectionLimits& limits);

}  // namespace torchext::core
