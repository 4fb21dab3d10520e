// Every backend fails, aborts and ends as DelegatingBackend does, under its own name.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <memory>
#include <mutex>
#include <ostream>
#include <set>
#include <thread>
#include <utility>

#include <ATen/ATen.h>

#include "c10d/backend/process_group_dear.h"
#include "c10d/backend/process_group_dssync.h"
#include "c10d/backend/process_group_hop.h"
#include "c10d/backend/process_group_prague.h"
#include "kit/ranks_as_threads.h"

namespace torchext {
namespace {

using kit::errorOf;
using kit::has;
using kit::soon;
using kit::World;
using std::chrono::milliseconds;
using std::chrono::seconds;

using Group = c10::intrusive_ptr<DelegatingBackend>;

struct BackendMaker {
  const char* name;
  Group (*make)(const World& world, int rank, const GroupOptions& common);

  friend void PrintTo(const BackendMaker& maker, std::ostream* out) { *out << maker.name; }
};

template <class Made>
Group makeGroup(const World& world, int rank, const GroupOptions& common) {
  auto options = c10::make_intrusive<typename Made::Options>(common.timeout);
  options->heartbeat_timeout = common.heartbeat_timeout;
  options->call_check = common.call_check;
  options->operation_timeout = common.operation_timeout;
  return makeBackend<Made>(rank, world.size, world.inner(rank), std::move(options));
}

class EveryBackendTest : public kit::RanksTest, public ::testing::WithParamInterface<BackendMaker> {
 protected:
  template <class Body>
  void onEach(const World& world, const GroupOptions& common, const Body& body) {
    onMade(
        world.size, [&](int rank) { return GetParam().make(world, rank, common); }, body);
  }
  std::string label(int rank, int size) const { return c10::str(GetParam().name, " [rank ", rank, " of ", size); }
};

GroupOptions commonOptions(milliseconds heartbeat = milliseconds(0), const std::string& check = "new") {
  GroupOptions options("common", seconds(60));
  options.heartbeat_timeout = heartbeat;
  options.call_check = check;
  return options;
}

c10::intrusive_ptr<c10d::Work> reduceAll(DelegatingBackend& group, const at::Tensor& tensor) {
  std::vector<at::Tensor> tensors{tensor};
  return group.allreduce(tensors, {});
}

// The group has failed: a later call has the same reason, at once, and touches nothing.
void expectRefusal(DelegatingBackend& group, const std::string& reason) {
  const at::Tensor untouched = at::full({4}, 7.0);
  const auto start = std::chrono::steady_clock::now();
  const std::string error = errorOf([&] { reduceAll(group, untouched)->wait(); });
  EXPECT_LT(std::chrono::steady_clock::now() - start, kit::kSoon);
  EXPECT_TRUE(has(error, reason)) << error;
  EXPECT_TRUE(at::equal(untouched, at::full({4}, 7.0)));
}

TEST_P(EveryBackendTest, NamesTwoCallsThatDiffer) {
  for (const int before : {0, 4}) {  // the others' call is a new one, or one that was predicted
    const World world(3);
    onEach(world, commonOptions(), [&](DelegatingBackend& group, int rank) {
      for (int call = 0; call < before; ++call) {
        reduceAll(group, at::ones({10}))->wait();
      }
      const std::string error = errorOf([&] { reduceAll(group, at::ones({rank == 1 ? 12 : 10}))->wait(); });
      EXPECT_TRUE(has(error, label(rank, 3))) << error;
      EXPECT_TRUE(has(error, c10::str("make different calls #", before + 1, ": "))) << error;
      EXPECT_TRUE(has(error, "all_reduce(sum, float32, 12 elements)")) << error;
      EXPECT_TRUE(has(error, "all_reduce(sum, float32, 10 elements)")) << error;
      expectRefusal(group, group.health()->reason().get().text);
    });
    EXPECT_EQ(world.data->mixedCalls(), 0);
  }
}

TEST_P(EveryBackendTest, GoesWithoutTheCheckOfCalls) {
  const World world(2);
  onEach(world, commonOptions(milliseconds(0), "off"), [&](DelegatingBackend& group, int /*rank*/) {
    const int sent = world.control->sends(0);
    const at::Tensor tensor = at::ones({3});
    reduceAll(group, tensor)->wait();
    EXPECT_TRUE(at::equal(tensor, at::full({3}, 2.0)));
    EXPECT_EQ(world.control->sends(0), sent);
  });
}

TEST_P(EveryBackendTest, NamesARankThatDies) {
  for (const auto& [size, victim] : {std::pair{2, 1}, std::pair{4, 0}, std::pair{4, 1}, std::pair{4, 3}}) {
    const World world(size);
    std::mutex mutex;
    std::set<std::string> reasons;
    onEach(world, commonOptions(), [&, size = size, victim = victim](DelegatingBackend& group, int rank) {
      reduceAll(group, at::ones({10}))->wait();
      if (rank == victim) {
        world.kill(victim);
        return;
      }
      const std::string error = errorOf([&] { reduceAll(group, at::ones({10}))->wait(); });
      const std::string reason = c10::str("rank ", victim, " died (connection closed)");
      EXPECT_TRUE(error.starts_with(label(rank, size))) << error;
      EXPECT_TRUE(has(error, "all_reduce") && has(error, reason)) << error;
      EXPECT_EQ(group.health()->reason().get().rank, victim);
      expectRefusal(group, reason);
      const std::lock_guard lock(mutex);
      reasons.insert(group.health()->reason().get().text);
    });
    EXPECT_EQ(reasons.size(), 1U);
  }
}

TEST_P(EveryBackendTest, NamesARankThatFallsSilent) {
  const World world(4);
  std::barrier<> sync_point(4);
  std::mutex mutex;
  std::set<std::string> reasons;
  onEach(world, commonOptions(milliseconds(kit::kSanitized ? 2000 : 600)), [&](DelegatingBackend& group, int rank) {
    reduceAll(group, at::ones({10}))->wait();
    if (rank == 0) {
      EXPECT_TRUE(soon([&] { return world.control->sends(2) >= 6; }));
      world.freeze(2);
    }
    sync_point.arrive_and_wait();
    if (rank != 2) {
      const std::string error = errorOf([&] { reduceAll(group, at::ones({10}))->wait(); });
      EXPECT_TRUE(has(error, label(rank, 4)) && has(error, "rank 2 has been silent for ")) << error;
      EXPECT_TRUE(has(error, "; it is at all_reduce #1, rank 1 at all_reduce #")) << error;
      EXPECT_EQ(group.health()->reason().get().rank, 2);
      expectRefusal(group, "rank 2 has been silent for ");
      const std::lock_guard lock(mutex);
      reasons.insert(group.health()->reason().get().text);
    }
    sync_point.arrive_and_wait();
  });
  EXPECT_EQ(reasons.size(), 1U);
}

// Stopped and woken up; a flap of a link looks the same.
TEST_P(EveryBackendTest, AStallBelowTheLimitIsNoAlarm) {
  const World world(3);
  std::barrier<> sync_point(3);
  onEach(world, commonOptions(milliseconds(kit::kSanitized ? 3000 : 1500)), [&](DelegatingBackend& group, int rank) {
    for (int stall = 0; stall < 2; ++stall) {
      if (rank == 0) {
        EXPECT_TRUE(soon([&] { return world.control->sends(1 + stall) >= 3; }));
        world.freeze(1 + stall);
      }
      sync_point.arrive_and_wait();
      if (rank == 0) {
        std::this_thread::sleep_for(milliseconds(400));
        world.thaw(1 + stall);
      }
      for (int call = 0; call < 10; ++call) {
        const at::Tensor tensor = at::ones({10 + call});
        reduceAll(group, tensor)->wait();
        EXPECT_TRUE(at::equal(tensor, at::full({10 + call}, 3.0)));
      }
    }
    EXPECT_FALSE(group.health()->failed()) << group.health()->reason().get().text;
  });
}

// It lives and beats, and is elsewhere.
TEST_P(EveryBackendTest, NamesARankThatHasNotCalled) {
  for (const bool predicted : {false, true}) {  // asked for before the call, or waited for in it
    const World world(3);
    std::barrier<> sync_point(3);
    GroupOptions common = commonOptions(milliseconds(3000));
    common.timeout = predicted ? milliseconds(60'000) : milliseconds(600);
    common.operation_timeout = milliseconds(predicted ? 600 : 0);
    onEach(world, common, [&](DelegatingBackend& group, int rank) {
      for (int call = 0; call < 5; ++call) {
        reduceAll(group, at::ones({10}))->wait();
      }
      if (rank != 1) {
        const std::string error = errorOf([&] { reduceAll(group, at::ones({predicted ? 10 : 20}))->wait(); });
        EXPECT_TRUE(has(error, "rank 1 has not called all_reduce #6, its last call is all_reduce #5, ")) << error;
        EXPECT_TRUE(has(error, "timed out")) << error;
        EXPECT_EQ(group.health()->reason().get().rank, 1);
        expectRefusal(group, "rank 1 has not called all_reduce #6");
      }
      sync_point.arrive_and_wait();
    });
  }
}

// A loaded machine delays the one or the other; a period of grace would delay all.
TEST_P(EveryBackendTest, AnAbortEndsTheWaitsOfAllRanksAtOnce) {
  using Clock = std::chrono::steady_clock;
  constexpr int kRanks = 4;
  const milliseconds at_once(kit::kSanitized ? 300 : 100);
  static_assert(GroupHealth::kRemoteGrace > milliseconds(300));
  for (const std::string mode : {"new", "predicted", "recv"}) {
    std::array<Clock::duration, kRanks> shortest;
    shortest.fill(Clock::duration::max());
    for (int round = 0; round < 5; ++round) {
      const World world(kRanks);
      std::barrier<> sync_point(kRanks);
      std::atomic<Clock::time_point> aborted;
      std::array<Clock::time_point, kRanks> ended;
      onEach(world, commonOptions(), [&](DelegatingBackend& group, int rank) {
        for (int call = 0; mode == "predicted" && call < 4; ++call) {
          reduceAll(group, at::ones({10}))->wait();
        }
        sync_point.arrive_and_wait();
        std::thread aborting;
        if (rank == 1) {
          aborting = std::thread([&] {
            std::this_thread::sleep_for(milliseconds(20));
            aborted = Clock::now();
            group.abort();
            group.abort();
          });
        }
        if (rank == 0) {
          EXPECT_TRUE(soon([&] { return group.health()->failed(); }));
        } else {
          std::vector<at::Tensor> tensors{at::ones({10})};
          const std::string error =
              errorOf([&] { (mode == "recv" ? group.recv(tensors, 0, 0) : group.allreduce(tensors, {}))->wait(); });
          EXPECT_TRUE(has(error, label(rank, kRanks)) && has(error, "rank 1 called abort()")) << error;
        }
        ended.at(static_cast<std::size_t>(rank)) = Clock::now();
        if (aborting.joinable()) {
          aborting.join();
        }
        expectRefusal(group, "rank 1 called abort()");
      });
      for (std::size_t rank = 0; rank < kRanks; ++rank) {
        shortest.at(rank) = std::min(shortest.at(rank), ended.at(rank) - aborted.load());
      }
    }
    for (const auto took : shortest) {
      EXPECT_LT(took, at_once) << mode;
    }
  }
}

TEST_P(EveryBackendTest, ShutsDownInTimeWithPendingCalls) {
  const World world(3);
  std::barrier<> sync_point(3);
  onEach(world, commonOptions(), [&](DelegatingBackend& group, int rank) {
    if (rank != 0) {
      std::vector<c10::intrusive_ptr<c10d::Work>> works;
      for (int call = 0; call < 5; ++call) {
        works.push_back(reduceAll(group, at::ones({1000})));
      }
      std::vector<at::Tensor> tensors{at::ones({3})};
      works.push_back(group.recv(tensors, 0, 0));
      const auto start = std::chrono::steady_clock::now();
      group.shutdown();
      EXPECT_LT(std::chrono::steady_clock::now() - start, kit::kSoon);
    }
    sync_point.arrive_and_wait();
  });
}

// As the callbacks of a hook of DDP's own their group: it ends on a thread that it would wait for.
TEST_P(EveryBackendTest, TheLastOwnerMayBeACallback) {
  for (const bool aborted : {false, true}) {
    const World world(2);
    std::barrier<> sync_point(2);
    onRanks(2, [&](int rank) {
      Group group = GetParam().make(world, rank, commonOptions());
      const std::weak_ptr<GroupHealth> health = group->health();
      if (rank == 0) {
        reduceAll(*group, at::ones({4}))->getFuture()->addCallback([owner = group](c10::ivalue::Future&) {});
        group.reset();
      }
      sync_point.arrive_and_wait();
      if (rank == 1 && aborted) {
        group->abort();
      } else if (rank == 1) {
        reduceAll(*group, at::ones({4}))->wait();
      }
      group.reset();
      EXPECT_TRUE(soon([&] { return health.expired(); })) << "on rank " << rank;
    });
    EXPECT_EQ(world.data->pending(), 0U);
  }
}

// The backend "torchext" is dear's class under another name.
INSTANTIATE_TEST_SUITE_P(Backends, EveryBackendTest,
                         ::testing::Values(BackendMaker{"prague", &makeGroup<ProcessGroupPrague>},
                                           BackendMaker{"hop", &makeGroup<ProcessGroupHop>},
                                           BackendMaker{"dssync", &makeGroup<ProcessGroupDSSync>},
                                           BackendMaker{"dear", &makeGroup<ProcessGroupDear>}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace torchext
