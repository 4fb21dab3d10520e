// Replays the rounds of all ranks: every chunk is added up once, by its owner, and everybody gets it.
#include "core/transport/shard_schedule.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/base/check.h"
#include "tests/cpp/core/base/expect_throw.h"

namespace torchext::core {
namespace {

using Rounds = std::vector<std::vector<ShardRound>>;        // [rank]
using Sums = std::vector<std::vector<std::multiset<int>>>;  // [rank][chunk]: whose values have been added up

// A round of all ranks at a time; `take` merges a chunk that comes into the one that is there.
template <class Take>
void replay(const Rounds& rounds, Sums& sums, const Take& take) {
  for (std::size_t round = 0; round < rounds.front().size(); ++round) {
    const Sums before = sums;
    for (std::size_t rank = 0; rank < rounds.size(); ++rank) {
      const ShardRound& own = rounds[rank][round];
      const ShardRound& other = rounds[index(own.from)][round];
      ASSERT_EQ(other.to, static_cast<int>(rank));
      ASSERT_EQ(other.sent, own.received);
      for (const int chunk : own.received) {
        take(sums[rank][index(chunk)], before[index(own.from)][index(chunk)]);
      }
    }
  }
}

void expectExact(const Rounds& reduce_scatter, const Rounds& all_gather, const std::string& what) {
  const std::size_t ranks = reduce_scatter.size();
  Sums sums(ranks);
  std::multiset<int> everybody;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    sums[rank].assign(ranks, {static_cast<int>(rank)});
    everybody.insert(static_cast<int>(rank));
  }
  replay(reduce_scatter, sums, [](auto& own, const auto& other) { own.insert(other.begin(), other.end()); });
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    EXPECT_EQ(sums[rank][rank], everybody) << what << ", rank " << rank;
    std::size_t sent = 0;
    for (const ShardRound& round : reduce_scatter[rank]) {
      sent += round.sent.size();
    }
    EXPECT_EQ(sent, ranks - 1) << what;
  }
  replay(all_gather, sums, [](auto& own, const auto& other) { own = other; });
  for (const auto& of_rank : sums) {
    for (const auto& chunk : of_rank) {
      EXPECT_EQ(chunk, everybody) << what;
    }
  }
}

void expectExact(const RankGrid& grid, const std::string& what) {
  Rounds reduce_scatter;
  Rounds all_gather;
  for (int rank = 0; rank < static_cast<int>(grid.order.size()); ++rank) {
    reduce_scatter.push_back(reduceScatterRounds(grid, rank));
    all_gather.push_back(allGatherRounds(grid, rank));
  }
  expectExact(reduce_scatter, all_gather, what);
}

// Chunks that cross from one room into another in both halves, by all ranks together.
int crossings(const RankGrid& grid, const std::vector<int>& room_of) {
  int chunks = 0;
  for (int rank = 0; rank < static_cast<int>(room_of.size()); ++rank) {
    for (const auto& rounds : {reduceScatterRounds(grid, rank), allGatherRounds(grid, rank)}) {
      for (const ShardRound& round : rounds) {
        chunks += room_of[index(rank)] == room_of[index(round.to)] ? 0 : static_cast<int>(round.sent.size());
      }
    }
  }
  return chunks;
}

TEST(ShardSchedule, EveryGridAddsUpEveryChunkOnce) {
  for (int ranks = 1; ranks <= 17; ++ranks) {
    expectExact(ringGrid(ranks), concat("a ring of ", ranks));
    for (int rooms = 1; rooms <= ranks; ++rooms) {
      std::vector<int> blocks;
      std::vector<int> dealt;
      for (int rank = 0; rank < ranks; ++rank) {
        blocks.push_back(rank * rooms / ranks);
        dealt.push_back(rank % rooms);
      }
      expectExact(roomGrid(blocks), concat(ranks, " ranks in blocks, rooms: ", rooms));
      expectExact(roomGrid(dealt), concat(ranks, " ranks dealt, rooms: ", rooms));
    }
  }
}

TEST(ShardSchedule, DirectRoundsAddUpEveryChunkOnce) {
  for (int ranks = 1; ranks <= 9; ++ranks) {
    Rounds reduce_scatter;
    Rounds all_gather;
    for (int rank = 0; rank < ranks; ++rank) {
      reduce_scatter.push_back(directReduceScatterRounds(ranks, rank));
      all_gather.push_back(directAllGatherRounds(ranks, rank));
    }
    expectExact(reduce_scatter, all_gather, concat("directly, ranks: ", ranks));
  }
}

TEST(ShardSchedule, RoomsFirstInsideThenBetween) {
  const auto rounds = reduceScatterRounds(roomGrid({0, 1, 0, 1}), 3);
  ASSERT_EQ(rounds.size(), 2U);
  EXPECT_EQ(rounds[0].to, 1);  // of its own room
  EXPECT_EQ(rounds[0].sent, (std::vector<int>{0, 1}));
  EXPECT_EQ(rounds[1].to, 2);  // of the same place in the other
  EXPECT_EQ(rounds[1].sent, (std::vector<int>{2}));
  EXPECT_EQ(rounds[1].received, (std::vector<int>{3}));
}

TEST(ShardSchedule, UnequalRoomsAreARingThatEntersEachOnce) {
  const std::vector<int> room_of{7, 3, 7, 3, 7};
  const RankGrid grid = roomGrid(room_of);
  EXPECT_EQ(grid.order, (std::vector<int>{1, 3, 0, 2, 4}));
  EXPECT_EQ(grid.sides, (std::vector<int>{5}));
  EXPECT_EQ(roomGrid({0, 1, 2}).sides, (std::vector<int>{3}));
  EXPECT_EQ(roomGrid({4, 4, 4}).sides, (std::vector<int>{3}));
}

// 8 hosts in 2 racks, in chunks of S / 8, both halves and both ways.
TEST(ShardSchedule, RoomsSendTheLeastBehindAnUplink) {
  const std::vector<int> in_order{0, 0, 0, 0, 1, 1, 1, 1};
  const std::vector<int> interleaved{0, 1, 0, 1, 0, 1, 0, 1};
  const int once = 2 * 8;  // S each way
  EXPECT_EQ(crossings(ringGrid(8), in_order), once * 7 / 4);
  EXPECT_EQ(crossings(ringGrid(8), interleaved), once * 7);
  EXPECT_EQ(crossings(roomGrid(in_order), in_order), once);
  EXPECT_EQ(crossings(roomGrid(interleaved), interleaved), once);
}

TEST(ShardSchedule, RefusesARankThatIsNotThere) {
  EXPECT_THROW_MESSAGE(reduceScatterRounds(ringGrid(4), 4), std::invalid_argument, "rank = 4");
  EXPECT_THROW_MESSAGE(ringGrid(0), std::invalid_argument, "ranks = 0");
}

}  // namespace
}  // namespace torchext::core
