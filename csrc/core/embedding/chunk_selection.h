// selectChunks() says which chunks stay and which enter when an embedding table is pruned (FIITED, section 3.2).
//
// The `capacity` most useful chunks of all, resident or not, are to be resident afterwards. Order: utility; where equal
// residents first (nothing moves without a gain), then the smaller key. That is a total order: the answer is the same
// on all ranks and for every order of the candidates.
//
// Millions of candidates are looked at once, and most of them only compared with two numbers that a sample suggests.
// Where more chunks are to change places than may at once, the two numbers are on either side of the threshold, and
// only residents below the one and absent chunks above the other are kept: a few more than change places. Otherwise the
// threshold is between the two numbers, and what changes places for sure is kept, and the narrow band between them.
// What was kept is settled exactly afterwards; where the sample was misleading, everything is looked at again without
// it. The result is always exact.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
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
  // Whether as many as max_swaps allows are believed to change places, all residents among them below `low` and all
  // absent chunks above `high`: what is between is then not looked at.
  bool swaps_are_outside = false;
};

// The band, with an error of at most about one in a million, from `sample`: of `keys` chunks, absent ones without
// utility among them, each as likely as the others; residents' utility as it counts. Small samples say nothing.
SelectionBand guessBand(std::vector<ChunkCandidate> sample, std::int64_t keys, std::int64_t capacity);

// The same for a table in which more chunks, of which so many are residents, are to change places than limits allow;
// nothing where the sample does not say so.
std::optional<SelectionBand> guessSwaps(const std::vector<ChunkCandidate>& sample, std::int64_t keys,
                                        std::int64_t residents, const SelectionLimits& limits);

// One look at all candidates: offer() each once, then settled(), then finish().
class ChunkSelector {
 public:
  // std::invalid_argument when capacity or max_swaps is negative or hysteresis is not 0 or more.
  ChunkSelector(const SelectionLimits& limits, const SelectionBand& band);

  // Every resident, and the absent ones that may enter (utility above 0); as they are, without hysteresis.
  void offer(std::int64_t key, std::int32_t slot, float utility) {
    const Selection selection = rules_.judge(slot, utility);
    residents_ += static_cast<std::size_t>(-selection.resident);
    above_ += static_cast<std::size_t>(-selection.over);
    below_ += static_cast<std::size_t>(-selection.under);
    if (selection.kept != 0) {  // as with few: the only branch, and one that is easily predicted
      keep(key, slot, utility);
    }
  }
  // The same for the chunks 0, 1, ... of a table, absent ones without utility among them.
  void offerAll(std::span<const std::int32_t> slots, std::span<const float> utilities);

  // Whether the band was right. If not, nothing can be said: begin again, with SelectionBand{}.
  bool settled() const;
  // The answer; once.
  ChunkSelection finish();

 private:
  // Each all ones or zero, made without a branch: so that compilers judge several chunks at once.
  struct Selection {
    std::int32_t resident;
    std::int32_t over;  // more useful than the band, by utility alone
    std::int32_t under;
    std::int32_t kept;
  };
  struct Rules {
    float resident_counts;  // times its utility
    float high;
    float low;
    std::int32_t between;  // whether that is kept

    // As it counts. Without a condition in sight, from which compilers would make a branch.
    float counted(std::int32_t slot, float utility) const {
      const auto absent = std::bit_cast<std::int32_t>(1.0F);
      return utility *
             std::bit_cast<float>(absent ^ (~(slot >> 31) & (absent ^ std::bit_cast<std::int32_t>(resident_counts))));
    }
    Selection judge(std::int32_t slot, float utility) const {
      const float as_it_counts = counted(slot, utility);
      const std::int32_t resident = slot >= 0 ? -1 : 0;
      const std::int32_t over = as_it_counts > high ? -1 : 0;
      const std::int32_t under = as_it_counts < low ? -1 : 0;
      return {resident, over, under, (between & ~(over | under)) | (over & ~resident) | (under & resident)};
    }
  };
  void keep(std::int64_t key, std::int32_t slot, float utility);
  // Residents that may leave at most, and absent ones that may enter then.
  std::size_t mostDrops() const;
  std::size_t room(std::size_t drops) const { return static_cast<std::size_t>(limits_.capacity) + drops - residents_; }

  SelectionLimits limits_;
  SelectionBand band_;
  Rules rules_;
  std::size_t residents_ = 0;
  std::size_t above_ = 0;
  std::size_t below_ = 0;
  std::vector<ChunkCandidate> between_;
  ChunkSelection selection_;
};

// The same for candidates that exist as a list.
ChunkSelection selectChunks(const std::vector<ChunkCandidate>& candidates, const SelectionLimits& limits);

}  // namespace torchext::core
