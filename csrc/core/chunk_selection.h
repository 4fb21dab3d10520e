// Who stays and who enters when an embedding table is pruned (FIITED, section 3.2).
//
// The `capacity` most useful chunks of all, resident or not, are to be resident afterwards. Order: utility; where equal
// residents first (nothing moves without a gain), then the smaller key. That is a total order: the answer is the same
// on all ranks and for every order of the candidates.
//
// The threshold is guessed from a sample, so that one pass over millions of candidates leaves a narrow band around it
// to be sorted; the band is checked against exact counts and widened where the guess was wrong. The result is always
// exact.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace torchext::core {

struct ChunkCandidate {
  float utility = 0;
  std::int32_t key = 0;
  std::int32_t slot = -1;  // -1: absent
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

// Moves the `count` most useful candidates to the front, in no particular order.
void partitionMostUseful(std::vector<ChunkCandidate>& candidates, std::size_t count);

// candidates: every resident, and the absent ones that may enter (utility above 0). std::invalid_argument when capacity
// or max_swaps is negative or hysteresis is not 0 or more.
ChunkSelection selectChunks(std::vector<ChunkCandidate> candidates, const SelectionLimits& limits);

}  // namespace torchext::core
