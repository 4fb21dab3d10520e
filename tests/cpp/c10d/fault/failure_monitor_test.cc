// FailureMonitor tells every rank who died or fell silent, once, and takes an orderly leave for no death.
#include "c10d/fault/failure_monitor.h"

#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <memory>
#include <mutex>

#include <ATen/ATen.h>

#include "kit/ranks_as_threads.h"

namespace torchext {
namespace {

using kit::errorOf;
using kit::has;
using kit::soon;
using kit::World;
using std::chrono::milliseconds;
using std::chrono::seconds;

// One rank with nothing but its monitor, and what it was told.
struct Watcher {
  Watcher(const std::shared_ptr<kit::FakeNetwork>& network, int rank, int size, milliseconds heartbeat)
      : backend(network->connect(rank)), monitor(std::make_unique<FailureMonitor>(backend, rank, size)) {
    FailureMonitor::Events events;
    events.fault = [this](const FaultMessage& fault) {
      const std::lock_guard lock(mutex);
      faults.push_back(fault);
    };
    events.lost = [this](int lost_rank) {
      const std::lock_guard lock(mutex);
      lost.push_back(lost_rank);
    };
    events.heartbeat.progress = [this] {
      core::Progress progress;
      progress.started = started;
      return progress;
    };
    events.heartbeat.silent = [this](std::chrono::duration<double> silence, const core::Progress& last) {
      const std::lock_guard lock(mutex);
      silences.emplace_back(silence.count(), last.started);
    };
    events.heartbeat.tick = [] {};
    monitor->start(heartbeat, std::move(events));
  }
  std::size_t told() const {
    const std::lock_guard lock(mutex);
    return faults.size();
  }
  FaultMessage first() const {
    const std::lock_guard lock(mutex);
    return faults.at(0);
  }
  std::size_t silent() const {
    const std::lock_guard lock(mutex);
    return silences.size();
  }
  // As a process that leaves does, with or without a word.
  void end(bool leave) {
    monitor->stop(leave);
    monitor->releaseGroup();
    backend.reset();
  }

  c10::intrusive_ptr<c10d::Backend> backend;
  std::atomic<std::uint64_t> started{0};
  mutable std::mutex mutex;  // guards what follows
  std::vector<FaultMessage> faults;
  std::vector<int> lost;
  std::vector<std::pair<double, std::uint64_t>> silences;
  std::unique_ptr<FailureMonitor> monitor;  // last: its threads use the rest
};

class FailureMonitorTest : public kit::RanksTest {
 protected:
  ~FailureMonitorTest() override {
    for (const auto& watcher : watchers) {
      watcher->monitor->stop(false);
    }
  }
  void watch(int size, milliseconds heartbeat = milliseconds(0)) {
    network = std::make_shared<kit::FakeNetwork>(size);
    for (int rank = 0; rank < size; ++rank) {
      watchers.push_back(std::make_unique<Watcher>(network, rank, size, heartbeat));
    }
  }
  Watcher& at(int rank) { return *watchers.at(static_cast<std::size_t>(rank)); }
  bool allTold(const std::vector<int>& ranks) {
    return soon([&] { return std::all_of(ranks.begin(), ranks.end(), [&](int rank) { return at(rank).told() > 0; }); });
  }

  std::shared_ptr<kit::FakeNetwork> network;
  std::vector<std::unique_ptr<Watcher>> watchers;
};

TEST_F(FailureMonitorTest, ADeathIsToldToAll) {
  watch(5);
  network->close(2);
  ASSERT_TRUE(allTold({0, 1, 3, 4}));
  std::this_thread::sleep_for(milliseconds(50));
  for (const int rank : {0, 1, 3, 4}) {
    EXPECT_EQ(at(rank).told(), 1U);
    const FaultMessage fault = at(rank).first();
    EXPECT_EQ(fault.kind, FaultMessage::Kind::kPeerDied);
    EXPECT_EQ(fault.rank, 2) << "on rank " << rank;
    EXPECT_EQ(fault.detected_by, 1);
    EXPECT_EQ(fault.reason, "connection closed");
    const std::lock_guard lock(at(rank).mutex);
    EXPECT_EQ(at(rank).lost, rank == 1 ? std::vector{2} : std::vector<int>{});
  }
}

TEST_F(FailureMonitorTest, OfTwoDeathsEachRankHasOneReason) {
  watch(5);
  network->close(1);
  network->close(3);
  ASSERT_TRUE(allTold({0, 2, 4}));
  std::this_thread::sleep_for(milliseconds(50));
  for (const int rank : {0, 2, 4}) {
    EXPECT_EQ(at(rank).told(), 1U);
    EXPECT_TRUE(at(rank).first().rank == 1 || at(rank).first().rank == 3);
  }
  EXPECT_EQ(at(0).first().rank, 1);
}

// A rank that dies as it passes a fault message on leaves those behind it with a reason, too.
TEST_F(FailureMonitorTest, AMessengerThatDiesIsNoticed) {
  watch(4);
  network->afterSends(1, 1, [this] { network->close(1); });
  network->close(3);
  ASSERT_TRUE(allTold({0, 2}));
  EXPECT_EQ(at(2).first().rank, 3);
  EXPECT_EQ(at(0).first().rank, 1);
  EXPECT_EQ(at(0).first().kind, FaultMessage::Kind::kPeerDied);
}

TEST_F(FailureMonitorTest, AnAnnouncementGoesRoundOnce) {
  watch(4);
  at(2).monitor->announce({FaultMessage::Kind::kFailure, 0, -1, "enough"});
  at(2).monitor->announce({FaultMessage::Kind::kAbort, 2, -1, "a second one"});
  ASSERT_TRUE(allTold({0, 1, 3}));
  std::this_thread::sleep_for(milliseconds(50));
  for (const int rank : {0, 1, 3}) {
    EXPECT_EQ(at(rank).told(), 1U);
    EXPECT_EQ(at(rank).first().reason, "enough");
    EXPECT_EQ(at(rank).first().rank, 0);
    EXPECT_EQ(at(rank).first().detected_by, 2);
  }
  EXPECT_EQ(at(2).told(), 0U) << "a rank's own fault message comes back to it";
  EXPECT_EQ(network->sends(3), 0) << "the last one passes it on";
}

TEST_F(FailureMonitorTest, OfTwoAnnouncementsEachRankPassesOnOne) {
  watch(4);
  std::thread other([this] { at(2).monitor->announce({FaultMessage::Kind::kFailure, 2, -1, "from 2"}); });
  at(0).monitor->announce({FaultMessage::Kind::kFailure, 0, -1, "from 0"});
  other.join();
  ASSERT_TRUE(allTold({1, 3}));
  std::this_thread::sleep_for(milliseconds(50));
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_LE(at(rank).told(), 1U);
    EXPECT_LE(network->sends(rank), 1);
  }
}

TEST_F(FailureMonitorTest, ALeaveIsNoDeath) {
  watch(4);
  at(2).end(true);
  EXPECT_TRUE(soon([this] { return at(1).monitor->successorLeft(); }));
  std::this_thread::sleep_for(milliseconds(150));
  for (const int rank : {0, 1, 3}) {
    EXPECT_EQ(at(rank).told(), 0U) << "on rank " << rank;
    EXPECT_EQ(at(rank).monitor->successorLeft(), rank == 1);
    const std::lock_guard lock(at(rank).mutex);
    EXPECT_TRUE(at(rank).lost.empty());
  }
  // The others are watched on.
  network->close(1);
  ASSERT_TRUE(allTold({0, 3}));
  EXPECT_EQ(at(3).first().rank, 1);
}

TEST_F(FailureMonitorTest, AFaultPassesByThoseThatHaveLeft) {
  for (const auto& leavers : {std::vector{1}, std::vector{1, 2}, std::vector{2, 1}}) {
    SCOPED_TRACE(leavers.back());
    watch(5);
    for (const int rank : leavers) {
      at(rank).end(true);
    }
    EXPECT_TRUE(soon([this] { return at(0).monitor->successorLeft(); }));
    at(3).monitor->announce({FaultMessage::Kind::kFailure, 3, -1, "gave up"});
    EXPECT_TRUE(allTold({0, 4}));
    EXPECT_EQ(at(0).first().rank, 3);
    for (const int rank : {0, 4}) {
      EXPECT_EQ(at(rank).told(), 1U);
    }
    for (const auto& watcher : watchers) {
      watcher->monitor->stop(false);
    }
    watchers.clear();
  }
}

// Whoever is behind one that has left may have told that one that it leaves, too.
TEST_F(FailureMonitorTest, BehindOneThatHasLeftAClosedConnectionIsNoDeath) {
  watch(4);
  at(1).end(true);
  EXPECT_TRUE(soon([this] { return at(0).monitor->successorLeft(); }));
  network->close(2);
  std::this_thread::sleep_for(milliseconds(100));
  EXPECT_EQ(at(0).told(), 0U);
  EXPECT_EQ(at(3).told(), 0U);
  at(3).monitor->announce({FaultMessage::Kind::kFailure, 3, -1, "gave up"});
  EXPECT_TRUE(allTold({0})) << "it listens to the next one";
}

// The message was on its way to a predecessor that was about to leave.
TEST_F(FailureMonitorTest, AFaultMessageIsSentAgainWhenItsReceiverWasGone) {
  watch(4, milliseconds(500));
  EXPECT_TRUE(soon([this] { return network->sends(2) >= 2; }));
  at(1).monitor->stop(true);  // takes no more messages, and its connections are still open
  at(2).monitor->announce({FaultMessage::Kind::kFailure, 2, -1, "gave up"});
  std::this_thread::sleep_for(milliseconds(100));
  EXPECT_EQ(at(0).told(), 0U);
  at(1).end(false);
  EXPECT_TRUE(allTold({0, 3}));
}

TEST_F(FailureMonitorTest, AnEndWithoutLeaveIsADeath) {
  watch(3);
  at(2).end(false);
  ASSERT_TRUE(allTold({0, 1}));
  EXPECT_EQ(at(0).first().rank, 2);
  EXPECT_EQ(at(0).first().kind, FaultMessage::Kind::kPeerDied);
}

TEST_F(FailureMonitorTest, ARankThatHasFailedSendsNoLeave) {
  watch(3);
  at(2).monitor->announce({FaultMessage::Kind::kFailure, 2, -1, "gave up"});
  ASSERT_TRUE(allTold({0, 1}));
  at(2).end(true);
  std::this_thread::sleep_for(milliseconds(50));
  EXPECT_FALSE(at(1).monitor->successorLeft());
  EXPECT_EQ(at(1).told(), 1U);
}

// A connection that closes after a fault message is told to the predecessor alone.
TEST_F(FailureMonitorTest, ALateDeathIsNotedByItsPredecessor) {
  watch(4);
  at(0).monitor->announce({FaultMessage::Kind::kFailure, 2, -1, "rank 2 is silent"});
  ASSERT_TRUE(allTold({1, 2, 3}));
  network->close(2);
  EXPECT_TRUE(soon([this] {
    const std::lock_guard lock(at(1).mutex);
    return at(1).lost == std::vector{2};
  }));
  EXPECT_EQ(at(1).told(), 1U);
  EXPECT_EQ(at(0).told(), 0U);
}

TEST_F(FailureMonitorTest, ASilentRankIsNoticedByItsPredecessorOnce) {
  constexpr double kTimeout = kit::kSanitized ? 2.0 : 1.0;
  watch(4, std::chrono::duration_cast<milliseconds>(std::chrono::duration<double>(kTimeout)));
  at(2).started = 41;
  EXPECT_TRUE(soon([this] { return network->sends(2) >= 3; }));
  network->freeze(2);
  EXPECT_TRUE(soon([this] { return at(1).silent() > 0; }));
  std::this_thread::sleep_for(milliseconds(300));
  {
    const std::lock_guard lock(at(1).mutex);
    ASSERT_EQ(at(1).silences.size(), 1U);
    EXPECT_GE(at(1).silences[0].first, kTimeout);
    EXPECT_EQ(at(1).silences[0].second, 41U) << "where it last said to be";
  }
  EXPECT_EQ(at(0).silent() + at(3).silent(), 0U);
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(at(rank).told(), 0U) << "what follows from silence is the group's matter";
  }
}

TEST_F(FailureMonitorTest, WithoutHeartbeatsNobodyIsSuspected) {
  watch(3);
  network->freeze(2);
  std::this_thread::sleep_for(milliseconds(300));
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(at(rank).silent(), 0U);
    EXPECT_EQ(network->sends(rank), 0);
  }
}

// Who has left in order is not missed.
TEST_F(FailureMonitorTest, NobodyIsSuspectedAfterItsLeave) {
  watch(3, milliseconds(500));
  EXPECT_TRUE(soon([this] { return network->sends(2) >= 2; }));
  at(2).end(true);
  std::this_thread::sleep_for(milliseconds(900));
  EXPECT_EQ(at(1).silent(), 0U);
  EXPECT_EQ(at(1).told(), 0U);
}

TEST_F(FailureMonitorTest, AQueryBringsBackWhoIsBehind) {
  watch(4);
  for (int rank = 0; rank < 4; ++rank) {
    at(rank).started = rank == 3 ? 4 : rank == 1 ? 6 : 7;
  }
  const auto answer = at(0).monitor->ask(7, seconds(10));
  ASSERT_TRUE(answer);
  EXPECT_EQ(answer->laggard, 3);
  EXPECT_EQ(answer->progress.started, 4U);
  const auto nobody = at(2).monitor->ask(4, seconds(10));
  ASSERT_TRUE(nobody);
  EXPECT_EQ(nobody->laggard, -1);
  network->freeze(3);
  EXPECT_FALSE(at(0).monitor->ask(8, milliseconds(100)));
}

TEST_F(FailureMonitorTest, NewsOfStepsGoRoundAndOldNewsDoNot) {
  watch(4);
  const auto everywhere = [this](int model, std::int64_t steps) {
    return soon([&] {
      for (int rank = 0; rank < 4; ++rank) {
        const auto told = at(rank).monitor->furthest(model);
        if (!told || told->steps != steps) {
          return false;
        }
      }
      return true;
    });
  };
  EXPECT_FALSE(at(0).monitor->furthest(5));
  at(1).monitor->tell({.model = 5, .meeting = 1, .steps = 10});
  EXPECT_TRUE(everywhere(5, 10));
  EXPECT_EQ(at(3).monitor->furthest(5)->origin, 1);
  std::this_thread::sleep_for(milliseconds(30));
  EXPECT_EQ(network->sends(2), 0) << "the last one tells the first";
  const int sent = network->sends(3);
  at(3).monitor->tell({.model = 5, .meeting = 1, .steps = 9});
  std::this_thread::sleep_for(milliseconds(30));
  EXPECT_EQ(network->sends(3), sent) << "old news are sent";
  at(3).monitor->tell({.model = 5, .meeting = 2, .steps = 1});
  EXPECT_TRUE(everywhere(5, 1)) << "steps of a later meeting count more";
  at(0).monitor->tell({.model = 6, .meeting = 1, .steps = 3});
  EXPECT_TRUE(everywhere(6, 3) && everywhere(5, 1));
}

// Junk, and what ends too early: Gloo accepts a message that is too short.
TEST_F(FailureMonitorTest, AMalformedMessageNamesItsSender) {
  for (const std::int64_t bytes : {256, 10, 0}) {
    watchers.clear();
    watch(3);
    std::vector<at::Tensor> junk{at::full({bytes}, 0x5a, at::kByte)};
    const auto work = at(2).backend->send(junk, 1, FailureMonitor::kReservedTags + 1);
    ASSERT_TRUE(allTold({0, 1, 2})) << bytes << " bytes";
    EXPECT_EQ(at(0).first().kind, FaultMessage::Kind::kFailure);
    EXPECT_EQ(at(0).first().rank, 2);
    EXPECT_TRUE(has(at(0).first().reason, "rank 2 sent a malformed message")) << at(0).first().reason;
    for (const auto& watcher : watchers) {
      watcher->monitor->stop(false);
    }
  }
}

TEST_F(FailureMonitorTest, StopsTwiceAndFromWithinNothing) {
  watch(2);
  const auto start = std::chrono::steady_clock::now();
  at(0).monitor->stop(true);
  at(0).monitor->stop(true);
  at(0).monitor->releaseGroup();
  at(0).monitor->releaseGroup();
  at(0).monitor->announce({FaultMessage::Kind::kFailure, 0, -1, "too late"});
  EXPECT_LT(std::chrono::steady_clock::now() - start, kit::kSoon);
  FailureMonitor alone(nullptr, 0, 1);
  alone.start(seconds(1), {});
  alone.announce({FaultMessage::Kind::kFailure, 0, -1, "to nobody"});
  EXPECT_FALSE(alone.ask(1, seconds(1)));
  alone.stop(true);
  EXPECT_EQ(at(1).told(), 0U);
}

// The same with whole groups: what a rank says of the other's death, silence, or end.

GroupOptions watchedOptions(milliseconds heartbeat) {
  GroupOptions options("prague", seconds(60));
  options.heartbeat_timeout = heartbeat;
  return options;
}

at::Tensor reduced(DelegatingBackend& group, double value) {
  std::vector<at::Tensor> tensors{at::full({3}, value)};
  group.allreduce(tensors, {})->wait();
  return tensors[0];
}

TEST_F(FailureMonitorTest, AGroupNamesItsSilentRank) {
  const World world(3);
  std::barrier<> end(3);
  onPlainGroups(world, watchedOptions(milliseconds(kit::kSanitized ? 2000 : 1000)),
                [&](DelegatingBackend& group, int rank) {
                  EXPECT_TRUE(at::equal(reduced(group, 1.0), at::full({3}, 3.0)));
                  end.arrive_and_wait();
                  if (rank == 0) {
                    EXPECT_TRUE(soon([&] { return world.control->sends(2) >= 6; }));
                    world.freeze(2);
                  }
                  if (rank != 2) {
                    const std::string error = errorOf([&] { reduced(group, 1.0); });
                    EXPECT_TRUE(has(error, "rank 2 has been silent for ")) << error;
                    EXPECT_TRUE(has(error, "; it is at all_reduce #1, rank 1 at all_reduce #")) << error;
                    EXPECT_TRUE(group.health()->reason().lostRanks().empty()) << "it may live";
                  }
                  end.arrive_and_wait();
                });
}

TEST_F(FailureMonitorTest, AGroupNamesItsDeadRankInACollective) {
  const World world(3);
  onPlainGroups(world, watchedOptions(milliseconds(0)), [&](DelegatingBackend& group, int rank) {
    reduced(group, 1.0);
    if (rank == 2) {
      world.kill(2);
      return;
    }
    const auto start = std::chrono::steady_clock::now();
    const std::string error = errorOf([&] { reduced(group, 1.0); });
    EXPECT_TRUE(has(error, "rank 2 died (connection closed)")) << error;
    EXPECT_TRUE(has(error, c10::str("prague [rank ", rank, " of 3]: all_reduce"))) << error;
    EXPECT_LT(std::chrono::steady_clock::now() - start, kit::kSoon);
    EXPECT_EQ(group.health()->reason().get().rank, 2);
    EXPECT_TRUE(group.health()->reason().lostRanks().contains(2));
    // Later ones have the same reason.
    EXPECT_TRUE(has(errorOf([&] { reduced(group, 1.0); }), "rank 2 died (connection closed)"));
  });
}

// Whoever is first: all ranks end with one of the two reasons, and keep it.
TEST_F(FailureMonitorTest, AGroupHasOneReasonARank) {
  const World world(4);
  std::barrier<> sync_point(4);
  std::vector<std::string> reasons(4);
  onPlainGroups(world, watchedOptions(milliseconds(0)), [&](DelegatingBackend& group, int rank) {
    sync_point.arrive_and_wait();
    if (rank % 2 == 0) {
      group.health()->poison(rank, c10::str("reason of rank ", rank));
    }
    EXPECT_TRUE(soon([&] { return group.health()->failed(); }));
    const auto first = group.health()->reason().get();
    sync_point.arrive_and_wait();
    group.health()->poison(3, "a later one");
    group.abort();
    EXPECT_EQ(group.health()->reason().get(), first);
    EXPECT_TRUE(first.text == "reason of rank 0" || first.text == "reason of rank 2") << first.text;
    sync_point.arrive_and_wait();
  });
}

TEST_F(FailureMonitorTest, AGroupIsWellWhenARankHasLeftInOrder) {
  const World world(3);
  std::barrier<> sync_point(3);
  onPlainGroups(world, watchedOptions(milliseconds(1000)), [&](DelegatingBackend& group, int rank) {
    reduced(group, 1.0);
    if (rank == 2) {
      group.shutdown();
    }
    sync_point.arrive_and_wait();
    std::this_thread::sleep_for(milliseconds(100));
    if (rank != 2) {
      EXPECT_FALSE(group.health()->failed()) << group.health()->reason().get().text;
      std::vector<at::Tensor> tensors{at::full({3}, rank)};
      (rank == 0 ? group.send(tensors, 1, 5) : group.recv(tensors, 0, 5))->wait();
      EXPECT_TRUE(at::equal(tensors[0], at::zeros({3}, at::kLong)));
    }
    sync_point.arrive_and_wait();
  });
}

}  // namespace
}  // namespace torchext
