// HopMailbox moves models and tokens between neighbours as its mode says, and ends with one reason on every rank.
#include "ddp/hop/hop_mailbox.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "hop_ranks.h"

namespace torchext {
namespace {

using core::CommunicationGraph;
using core::GraphKind;
using core::HopMode;
using kit::errorOf;
using kit::has;
using kit::World;
using std::chrono::milliseconds;

constexpr std::size_t kModelBytes = 64;
constexpr double kRankUnit = 1000;  // a model of rank r and iteration k holds r * kRankUnit + k

void fill(std::byte* block, double value) {
  for (std::size_t at = 0; at < kModelBytes; at += sizeof(value)) {
    std::memcpy(block + at, &value, sizeof(value));
  }
}

// The value that fills the block; a block that is torn fails the test.
double valueOf(const std::byte* block) {
  double first = 0;
  std::memcpy(&first, block, sizeof(first));
  for (std::size_t at = sizeof(first); at < kModelBytes; at += sizeof(first)) {
    EXPECT_EQ(std::memcmp(block, block + at, sizeof(first)), 0);
  }
  return first;
}

struct Taken {
  int sender;
  std::int64_t tag;
  double weight;
};

// One iteration; returns what was averaged.
std::vector<Taken> iterate(HopMailbox& mailbox, int rank, std::int64_t k) {
  fill(mailbox.ownBlock(k), rank * kRankUnit + static_cast<double>(k));
  mailbox.publish(k, true);
  std::vector<Taken> taken;
  for (const HopModel::Input& input : mailbox.take()) {
    const double value = valueOf(input.block);
    const int sender = static_cast<int>(value / kRankUnit);
    taken.push_back({sender, static_cast<std::int64_t>(value - sender * kRankUnit), input.weight});
  }
  mailbox.release();
  mailbox.enter(k + 1);
  return taken;
}

double totalWeight(const std::vector<Taken>& taken) {
  double total = 0;
  for (const Taken& model : taken) {
    total += model.weight;
  }
  return total;
}

class HopMailboxTest : public kit::HopRanksTest {
 protected:
  // body(mailbox, rank) between a mailbox's start and the drain that ends its training.
  template <class Body>
  void onMailboxes(const World& world, GraphKind graph, const HopMode& mode, const Body& body) {
    onHopGroups(world, [&](ProcessGroupHop& group, int rank) {
      HopMailbox mailbox(kit::attachable(group), kit::hopSetup(group, graph, mode, kModelBytes));
      body(mailbox, rank);
      EXPECT_TRUE(mailbox.drain(true));
      mailbox.stop();
      mailbox.stop();
    });
  }
};

TEST_F(HopMailboxTest, StandardModeTakesTheSameIterationOfAllNeighbours) {
  const World world(4);
  const auto graph = CommunicationGraph::builtIn(GraphKind::kRing, 4);
  onMailboxes(world, GraphKind::kRing, {}, [&](HopMailbox& mailbox, int rank) {
    for (std::int64_t k = 0; k < 30; ++k) {
      const std::vector<Taken> taken = iterate(mailbox, rank, k);
      EXPECT_EQ(taken.size(), graph.inNeighbours(rank).size());
      EXPECT_NEAR(totalWeight(taken), 1, 1e-12);
      for (const Taken& model : taken) {
        EXPECT_EQ(model.tag, k);
        EXPECT_DOUBLE_EQ(model.weight, graph.weight(model.sender, rank));
      }
    }
    EXPECT_EQ(mailbox.stats().averages, 30);
    EXPECT_TRUE(mailbox.stats().tokens.empty());
  });
}

TEST_F(HopMailboxTest, TokensBoundHowFarAheadAWorkerIs) {
  const World world(3);
  const HopMode mode{.max_iteration_gap = 2, .backup_workers = 1};
  onMailboxes(world, GraphKind::kFull, mode, [&](HopMailbox& mailbox, int rank) {
    for (std::int64_t k = 0; k < 20; ++k) {
      if (rank == 2) {
        std::this_thread::sleep_for(milliseconds(5));  // the straggler, whom a backup worker stands in for
      }
      EXPECT_GE(iterate(mailbox, rank, k).size(), 2U);
    }
    const HopStats stats = mailbox.stats();
    EXPECT_LE(stats.gaps.rbegin()->first, core::iterationGapBound(mode, 1, 1));
  });
}

TEST_F(HopMailboxTest, BoundedStalenessTakesModelsThatAreNoOlder) {
  constexpr int kStaleness = 3;
  const World world(3);
  onMailboxes(world, GraphKind::kFull, {.staleness = kStaleness}, [&](HopMailbox& mailbox, int rank) {
    for (std::int64_t k = 0; k < 20; ++k) {
      if (rank == 1) {
        std::this_thread::sleep_for(milliseconds(3));
      }
      const std::vector<Taken> taken = iterate(mailbox, rank, k);
      EXPECT_EQ(taken.size(), 3U);
      EXPECT_NEAR(totalWeight(taken), 1, 1e-12);
      for (const Taken& model : taken) {
        EXPECT_GE(model.tag, k - kStaleness);
      }
    }
  });
}

TEST_F(HopMailboxTest, NotifyAckSendsOnlyWhatIsAskedFor) {
  const World world(3);
  onMailboxes(world, GraphKind::kFull, {.notify_ack = true}, [&](HopMailbox& mailbox, int rank) {
    for (std::int64_t k = 0; k < 20; ++k) {
      EXPECT_EQ(iterate(mailbox, rank, k).size(), 3U);
    }
  });
}

TEST_F(HopMailboxTest, EachSessionCountsFromZeroAndKeepsNoModelOfTheLast) {
  const World world(3);
  std::barrier<> met(3);
  onMailboxes(world, GraphKind::kFull, {}, [&](HopMailbox& mailbox, int rank) {
    for (int session = 0; session < 3; ++session) {
      // Workers stop at different iterations: those that are still here go on with each other.
      for (std::int64_t k = 0; k < 5 + rank; ++k) {
        for (const Taken& model : iterate(mailbox, rank, k)) {
          EXPECT_EQ(model.tag, k);
        }
      }
      EXPECT_TRUE(mailbox.drain(false));
      met.arrive_and_wait();  // as in the collective that follows a drain
    }
  });
}

TEST_F(HopMailboxTest, ADrainWithALimitGivesUpWhileOthersTrain) {
  const World world(2);
  std::barrier<> gave_up(2);
  onMailboxes(world, GraphKind::kFull, {}, [&](HopMailbox& mailbox, int rank) {
    if (rank == 0) {
      EXPECT_FALSE(mailbox.drain(true, milliseconds(50)));
    }
    gave_up.arrive_and_wait();
  });
}

// Its model, its tokens and its acknowledgements: what each mode waits for.
TEST_F(HopMailboxTest, ADeadNeighbourEndsTheWaitOfEveryModeAndIsNamed) {
  const std::vector<HopMode> modes = {{},
                                      {.notify_ack = true},
                                      {.max_iteration_gap = 2},
                                      {.max_iteration_gap = 2, .backup_workers = 1},
                                      {.max_iteration_gap = 4, .staleness = 3}};
  for (const HopMode& mode : modes) {
    SCOPED_TRACE(::testing::Message() << "notify_ack " << mode.notify_ack << ", max_iteration_gap "
                                      << mode.max_iteration_gap << ", backup_workers " << mode.backup_workers
                                      << ", staleness " << mode.staleness);
    const World world(3);
    std::barrier<> started(3);
    onHopGroups(world, [&](ProcessGroupHop& group, int rank) {
      HopMailbox mailbox(kit::attachable(group), kit::hopSetup(group, GraphKind::kFull, mode, kModelBytes));
      iterate(mailbox, rank, 0);
      started.arrive_and_wait();
      if (rank == 2) {
        world.kill(2);
        return;
      }
      const std::string error = errorOf([&] {
        for (std::int64_t k = 1; k < 100; ++k) {  // some modes go on without it for a while
          iterate(mailbox, rank, k);
        }
      });
      EXPECT_TRUE(has(error, "rank 2")) << error;
      EXPECT_EQ(errorOf([&] { mailbox.checkUsable(); }), error);
      EXPECT_NE(errorOf([&] { mailbox.drain(true); }), "");
    });
  }
}

TEST_F(HopMailboxTest, AnotherModelIsRefusedBeforeItsBytesAreTaken) {
  const World world(2);
  onHopGroups(world, [&](ProcessGroupHop& group, int rank) {
    HopMailbox mailbox(kit::attachable(group),
                       kit::hopSetup(group, GraphKind::kFull, {}, kModelBytes, static_cast<std::uint64_t>(rank)));
    EXPECT_NE(errorOf([&] {
                iterate(mailbox, rank, 0);
                iterate(mailbox, rank, 1);
              }),
              "");
  });
}

TEST_F(HopMailboxTest, ANeighbourThatSendsNothingEndsTheWaitAtTheTimeout) {
  const World world(2);
  const auto waits = [&](ProcessGroupHop& group, int rank) {
    HopMailbox mailbox(kit::attachable(group), kit::hopSetup(group, GraphKind::kFull, {}, kModelBytes));
    if (rank == 0) {
      const std::string error = errorOf([&] { iterate(mailbox, rank, 0); });
      EXPECT_TRUE(has(error, "rank 0 waited 300 ms for the model of iteration 0 from rank 1")) << error;
    } else {
      EXPECT_TRUE(kit::soon([&] { return !errorOf([&] { mailbox.checkUsable(); }).empty(); }));
    }
  };
  onHopGroups(world, waits, milliseconds(300));
}

}  // namespace
}  // namespace torchext
