// shard_schedule says what a rank sends to whom, round by round, to reduce-scatter or gather a buffer of n chunks.
//
// The ranks stand in a grid. A reduce-scatter goes along one side after the other, and on each side the ranks that
// differ in nothing else are a ring: what a rank still adds to is cut into one part a place, and every part goes once
// around, to end where it belongs. So a rank of place (x, y) first gets the sums over its own x-ring of all chunks that
// ranks of the same x own, then the sum over everybody of its own chunk. An all-gather goes the same way back.
//
//   grid    sides      rounds            what it is for
//   ring    n          n - 1             large chunks: one sender a link
//   rooms   m, h       m - 1 + h - 1     h rooms of m ranks, near each other: between rooms 1/m of the buffer travels
//   direct  -          n - 1 at once     small chunks: one latency. No grid: every rank sends to every other.
// A rank sends (n - 1) / n of the buffer each way in all of them, and ends with its own chunk: rank r has chunk r.
// Pure values, the same on all ranks.
#pragma once

#include <vector>

namespace torchext::core {

struct RankGrid {
  std::vector<int> order;  // the rank of each place, the last side first; a permutation of 0 .. n - 1
  std::vector<int> sides;  // their product is n
  friend bool operator==(const RankGrid&, const RankGrid&) = default;
};

// In the order of ranks.
RankGrid ringGrid(int ranks);
// room_of[rank]: any numbers. Rooms of unequal size, of one rank, or a single one: a ring in the order of rooms, which
// enters and leaves each room once.
RankGrid roomGrid(const std::vector<int>& room_of);

struct ShardRound {
  int to;
  int from;
  std::vector<int> sent;      // chunks, ascending
  std::vector<int> received;  // likewise: what `from` sends in this round
};

// received: to be added to what the rank has.
std::vector<ShardRound> reduceScatterRounds(const RankGrid& grid, int rank);
std::vector<ShardRound> allGatherRounds(const RankGrid& grid, int rank);
// Rounds that do not depend on each other.
std::vector<ShardRound> directReduceScatterRounds(int ranks, int rank);
std::vector<ShardRound> directAllGatherRounds(int ranks, int rank);

}  // namespace torchext::core
