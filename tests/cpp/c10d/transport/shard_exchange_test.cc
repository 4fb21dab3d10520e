// ShardExchange leaves the exact sum of everybody's chunk with its owner, and gathers it, by every schedule and size.
#include "c10d/transport/shard_exchange.h"

#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <deque>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "c10d/backend/attachable_backend.h"
#include "c10d/fault/explain_error.h"
#include "c10d/transport/link_calibration.h"
#include "kit/ranks_as_threads.h"

namespace torchext {
namespace {

using core::RankGrid;
using kit::errorOf;
using kit::has;
using kit::World;
using std::chrono::milliseconds;
using std::chrono::seconds;

// Long buffers for their segments.
constexpr ShardTuning kShort{
    .direct_chunk_bytes = 64, .direct_chunk_bytes_rooms = 60, .segment_bytes = 256, .messages_ahead = 5};

struct Case {
  std::string name;
  int ranks;
  std::optional<RankGrid> grid;
};

std::vector<int> roomsOf(int ranks, int rooms, bool dealt) {
  std::vector<int> room_of(static_cast<std::size_t>(ranks));
  for (int rank = 0; int& room : room_of) {
    room = dealt ? rank % rooms : rank * rooms / ranks;
    ++rank;
  }
  return room_of;
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (int ranks = 1; ranks <= 9; ++ranks) {
    all.push_back({c10::str("a ring of ", ranks), ranks, std::nullopt});
  }
  for (const auto& [rooms, each] : std::vector<std::pair<int, int>>{{2, 2}, {2, 4}, {4, 2}, {3, 3}}) {
    for (const bool dealt : {false, true}) {
      const int ranks = rooms * each;
      all.push_back({c10::str(rooms, " rooms of ", each, dealt ? ", dealt" : ", in order"), ranks,
                     core::roomGrid(roomsOf(ranks, rooms, dealt))});
    }
  }
  all.push_back({"unequal rooms", 5, core::roomGrid({0, 1, 0, 1, 0})});
  return all;
}

void run(ShardOperation& operation) {
  operation.begin();
  operation.finish([] {});
  operation.drain();
}

class ShardExchangeTest : public kit::RanksTest {
 protected:
  // Whole numbers, so that sums have no rounding.
  static at::Tensor numbers(int rank, std::int64_t count) {
    return at::arange(count, at::kFloat).remainder(97) * (rank + 1);
  }

  // Both halves of several buffers; a reduce-scatter begins where the one before has posted all.
  void exchange(const Case& each, const std::vector<std::int64_t>& chunks);
};

void ShardExchangeTest::exchange(const Case& each, const std::vector<std::int64_t>& chunks) {
  const World world(each.ranks);
  onRanks(each.ranks, [&](int rank) {
    ShardExchange exchange(transportOf(world.data->connect(rank)), 3, kShort, each.grid);
    std::vector<at::Tensor> buffers;
    std::vector<std::unique_ptr<ShardOperation>> operations;
    for (const std::int64_t chunk : chunks) {
      buffers.push_back(numbers(rank, chunk * each.ranks));
      operations.push_back(exchange.reduceScatter(buffers.back(), 0.5));
    }
    operations.front()->begin();
    for (std::size_t i = 0; i < operations.size(); ++i) {
      operations[i]->finish([&] {
        if (i + 1 < operations.size()) {
          operations[i + 1]->begin();
        }
      });
    }
    for (std::size_t i = 0; i < chunks.size(); ++i) {
      operations[i]->drain();
      const at::Tensor sum = numbers(0, chunks[i] * each.ranks) * (0.5 * each.ranks * (each.ranks + 1) / 2);
      const auto own = [&](const at::Tensor& all) { return all.narrow(0, rank * chunks[i], chunks[i]); };
      EXPECT_TRUE(own(buffers[i]).equal(own(sum))) << each.name << ", chunks of " << chunks[i] << ", rank " << rank;
      run(*exchange.allGather(buffers[i]));
      EXPECT_TRUE(buffers[i].equal(sum)) << each.name << ", chunks of " << chunks[i] << ", rank " << rank;
    }
  });
  EXPECT_FALSE(world.data->jammed());
  EXPECT_EQ(world.data->pending(), 0U);
}

TEST_F(ShardExchangeTest, SumsAreExactInEverySize) {
  std::mt19937 random(7);  // NOLINT(cert-msc51-cpp): the same sizes in every run
  for (const Case& each : cases()) {
    std::vector<std::int64_t> chunks{0, 1, 16, 17, 64, 65, 1000};
    for (int more = 0; more < 4; ++more) {
      chunks.push_back(static_cast<std::int64_t>(random() % 700));
    }
    exchange(each, chunks);
  }
}

TEST_F(ShardExchangeTest, ARankSendsAllButItsOwnShare) {
  for (const Case& each : cases()) {
    const World world(each.ranks);
    onRanks(each.ranks, [&](int rank) {
      ShardExchange exchange(transportOf(world.data->connect(rank)), 3, kShort, each.grid);
      const at::Tensor buffer = numbers(rank, 300 * each.ranks);
      run(*exchange.reduceScatter(buffer, 1.0));
      EXPECT_EQ(exchange.bytesSent(), 1200U * static_cast<unsigned>(each.ranks - 1)) << each.name;
      run(*exchange.allGather(buffer));
      EXPECT_EQ(exchange.bytesSent(), 2400U * static_cast<unsigned>(each.ranks - 1)) << each.name;
    });
  }
}

TEST_F(ShardExchangeTest, DoublesAndHalves) {
  for (const auto dtype : {at::kDouble, at::kHalf, at::kBFloat16}) {
    const World world(4);
    onRanks(4, [&](int rank) {
      ShardExchange exchange(transportOf(world.data->connect(rank)), 3, kShort, core::roomGrid({0, 0, 1, 1}));
      const at::Tensor buffer = at::full({4 * 333}, rank + 1, dtype);
      run(*exchange.reduceScatter(buffer, 1.0));
      run(*exchange.allGather(buffer));
      EXPECT_TRUE(buffer.equal(at::full({4 * 333}, 10, dtype)));
    });
  }
}

// A rank dies at its n-th message, for every n: each survivor has the exact sum or an error that names the dead.
TEST_F(ShardExchangeTest, NamesARankThatDiesAtAnyMessage) {
  constexpr int kRanks = 4;
  constexpr int kDeaths = 16;
  std::atomic<int> errors{0};
  GroupOptions options("dear", seconds(30));
  options.heartbeat_timeout = milliseconds(0);
  for (const auto& grid : {core::ringGrid(kRanks), core::roomGrid({0, 1, 0, 1})}) {
    for (int death = 0; death < kDeaths; death += kit::kSanitized ? 5 : 1) {
      const World world(kRanks);
      std::barrier<> over(kRanks);
      world.data->afterSends(1, death + 1, [&world] { world.kill(1); });
      onRanks(kRanks, [&](int rank) {
        const auto group = makeBackend<AttachableBackend>(rank, kRanks, "dear", world.inner(rank),
                                                          c10::make_intrusive<GroupOptions>(options));
        const at::Tensor buffer = numbers(rank, 300 * kRanks);
        const std::string error = errorOf([&] {
          try {
            ShardExchange exchange(group->dataTransport(), 3, kShort, grid);
            run(*exchange.reduceScatter(buffer, 1.0));
          } catch (...) {
            std::rethrow_exception(explainToAll(*group->health(), std::current_exception(), {.name = "training"}));
          }
        });
        if (rank != 1 && !error.empty()) {
          ++errors;
          EXPECT_TRUE(has(error, "rank 1 died (connection closed)")) << "death " << death << ": " << error;
        }
        over.arrive_and_wait();
        group->shutdown();
      });
    }
  }
  EXPECT_GE(errors, 8) << "too few deaths fell into the call";
}

// Rank 3 never comes, and aborts. Who hears of its closed connection before its reason names that.
TEST_F(ShardExchangeTest, AnAbortEndsItsWaits) {
  const World world(4);
  GroupOptions options("dear", seconds(30));
  options.heartbeat_timeout = milliseconds(0);
  onMade(
      world.size,
      [&](int rank) {
        return makeBackend<AttachableBackend>(rank, world.size, "dear", world.inner(rank),
                                              c10::make_intrusive<GroupOptions>(options));
      },
      [&](AttachableBackend& group, int rank) {
        if (rank == 3) {
          group.abort();
          return;
        }
        ShardExchange exchange(group.dataTransport(), 3, kShort, core::roomGrid({0, 0, 1, 1}));
        const at::Tensor buffer = numbers(rank, 4000);
        const std::string error = errorOf([&] {
          try {
            run(*exchange.reduceScatter(buffer, 1.0));
            run(*exchange.allGather(buffer));
          } catch (...) {
            std::rethrow_exception(explainToAll(*group.health(), std::current_exception(), {.name = "training"}));
          }
        });
        EXPECT_TRUE(has(error, "rank 3")) << error;
      });
}

}  // namespace
}  // namespace torchext
