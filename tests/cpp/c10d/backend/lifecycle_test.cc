// DelegatingBackend ends in bounded time, however often and from wherever it is told to, and says why on every rank.
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <memory>
#include <thread>

#include <ATen/ATen.h>

#include "c10d/backend/attachable_backend.h"
#include "c10d/backend/connecting_store.h"
#include "c10d/backend/delegating_backend.h"
#include "c10d/backend/process_group_prague.h"
#include "c10d/fault/orderly_exit_scope.h"
#include "kit/ranks_as_threads.h"

namespace torchext {
namespace {

using kit::errorOf;
using kit::has;
using kit::soon;
using kit::World;
using std::chrono::milliseconds;
using std::chrono::seconds;
using Works = c10::intrusive_ptr<c10d::Work>;

GroupOptions quietOptions(const std::string& check = "new") {
  GroupOptions options("prague", seconds(60));
  options.heartbeat_timeout = milliseconds(0);
  options.call_check = check;
  return options;
}

Works allReduce(DelegatingBackend& group, const at::Tensor& tensor,
                c10d::ReduceOp::RedOpType op = c10d::ReduceOp::SUM) {
  std::vector<at::Tensor> tensors{tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  return group.allreduce(tensors, options);
}

class LifecycleTest : public kit::RanksTest {};

TEST_F(LifecycleTest, CollectivesAreForwardedExactly) {
  for (const std::string check : {"new", "every", "off"}) {
    const World world(3);
    onPlainGroups(world, quietOptions(check), [&](DelegatingBackend& group, int rank) {
      const at::Tensor sum = at::full({4}, rank + 1.0);
      allReduce(group, sum)->wait();
      EXPECT_TRUE(at::equal(sum, at::full({4}, 6.0)));
      const at::Tensor most = at::full({4}, rank + 1.0);
      allReduce(group, most, c10d::ReduceOp::MAX)->wait();
      EXPECT_TRUE(at::equal(most, at::full({4}, 3.0)));
      const at::Tensor mean = at::full({4}, rank + 2, at::kLong);  // Gloo averages no whole numbers
      allReduce(group, mean, c10d::ReduceOp::AVG)->wait();
      EXPECT_TRUE(at::equal(mean, at::full({4}, 3, at::kLong)));
      std::vector<at::Tensor> tensors{at::full({2}, rank + 1.0)};
      c10d::BroadcastOptions options;
      options.rootRank = 2;
      group.broadcast(tensors, options)->wait();
      EXPECT_TRUE(at::equal(tensors[0], at::full({2}, 3.0)));
      std::vector<at::Tensor> inputs{at::full({1}, rank + 0.0)};
      std::vector<std::vector<at::Tensor>> outputs{{at::empty({1}), at::empty({1}), at::empty({1})}};
      group.allgather(outputs, inputs, {})->wait();
      EXPECT_TRUE(at::equal(at::cat(outputs[0]), at::arange(3, at::kFloat)));
      group.barrier({})->wait();
      EXPECT_EQ(group.getSequenceNumberForGroup(), 6U);
    });
    EXPECT_EQ(world.data->pending(), 0U);
  }
}

// Calls that have started, and one that has not, as rank 2 makes none of them.
TEST_F(LifecycleTest, AbortEndsAllCallsOnAllRanks) {
  for (const std::string check : {"new", "off"}) {
    const World world(3);
    std::barrier<> ready(3);
    onPlainGroups(world, quietOptions(check), [&](DelegatingBackend& group, int rank) {
      std::vector<Works> works;
      if (rank != 2) {
        works.push_back(allReduce(group, at::ones({4})));
        works.push_back(allReduce(group, at::ones({5})));
        std::vector<at::Tensor> tensors{at::ones({1})};
        works.push_back(group.recv(tensors, 2, 3));
      }
      ready.arrive_and_wait();
      std::vector<std::thread> threads;
      if (rank == 2) {  // twice, and from two threads
        threads.emplace_back([&] { group.abort(); });
        group.abort();
        group.abort();
      }
      const auto start = std::chrono::steady_clock::now();
      for (const Works& work : works) {
        const std::string error = errorOf([&] { work->wait(); });
        EXPECT_TRUE(has(error, "rank 2 called abort()")) << error;
        EXPECT_TRUE(has(error, "this group cannot be used any more")) << error;
      }
      EXPECT_LT(std::chrono::steady_clock::now() - start, kit::kSoon);
      for (std::thread& thread : threads) {
        thread.join();
      }
      EXPECT_EQ(group.getError(), c10d::ErrorType::REMOTE_ERROR);
      EXPECT_TRUE(has(errorOf([&] { allReduce(group, at::ones({4})); }), "rank 2 called abort()"));
      std::vector<at::Tensor> tensors{at::ones({1})};
      EXPECT_TRUE(has(errorOf([&] { group.send(tensors, (rank + 1) % 3, 0); }), "rank 2 called abort()"));
    });
  }
}

TEST_F(LifecycleTest, ShutsDownTwiceAndFromSeveralThreads) {
  const World world(2);
  onPlainGroups(world, quietOptions(), [&](DelegatingBackend& group, int /*rank*/) {
    allReduce(group, at::ones({4}))->wait();
    const auto start = std::chrono::steady_clock::now();
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&] { group.shutdown(); });
    }
    group.shutdown();
    for (std::thread& thread : threads) {
      thread.join();
    }
    group.shutdown();
    group.abort();
    EXPECT_LT(std::chrono::steady_clock::now() - start, kit::kSoon);
    EXPECT_FALSE(group.health()->failed()) << group.health()->reason().get().text;
    const std::string error = errorOf([&] { allReduce(group, at::ones({4})); });
    EXPECT_TRUE(has(error, "prague [rank ") && has(error, "all_reduce: the group was shut down")) << error;
    EXPECT_TRUE(has(errorOf([&] { group.inner().of(c10::DeviceType::CPU); }), "the group was shut down"));
  });
}

TEST_F(LifecycleTest, ShutsDownAfterAnAbort) {
  const World world(2);
  onPlainGroups(world, quietOptions(), [&](DelegatingBackend& group, int rank) {
    if (rank == 0) {
      group.abort();
    }
    EXPECT_TRUE(soon([&] { return group.health()->failed(); }));
    const auto start = std::chrono::steady_clock::now();
    group.shutdown();
    group.shutdown();
    EXPECT_LT(std::chrono::steady_clock::now() - start, kit::kSoon);
  });
}

// A call that nobody else makes: shutdown gives it a second, and then ends it with a reason.
TEST_F(LifecycleTest, ShutdownEndsACallThatDoesNotEnd) {
  const World world(2);
  std::barrier<> sync_point(2);
  onPlainGroups(world, quietOptions(), [&](DelegatingBackend& group, int rank) {
    if (rank == 0) {
      const at::Tensor tensor = at::full({4}, 7.0);
      const Works work = allReduce(group, tensor);
      const auto future = work->getFuture();
      const auto start = std::chrono::steady_clock::now();
      group.shutdown();
      EXPECT_LT(std::chrono::steady_clock::now() - start, kit::kSoon);
      const std::string error = errorOf([&] { work->wait(); });
      EXPECT_TRUE(has(error, "all_reduce #1") &&
                  has(error, "rank 0 shut the group down while operations were under way"))
          << error;
      EXPECT_NE(errorOf([&] { future->waitAndThrow(); }), "");
      EXPECT_TRUE(work->isCompleted());
      EXPECT_TRUE(at::equal(tensor, at::full({4}, 7.0)));
    }
    sync_point.arrive_and_wait();
    if (rank == 1) {
      EXPECT_TRUE(soon([&] { return group.health()->failed(); }));
      EXPECT_TRUE(has(group.health()->reason().get().text, "rank 0 shut the group down")) << "on rank 1";
    }
  });
}

TEST_F(LifecycleTest, ADestructorShutsDown) {
  const World world(2);
  onRanks(2, [&](int rank) {
    auto group = makeBackend<DelegatingBackend>(rank, 2, "prague", world.inner(rank),
                                                c10::make_intrusive<GroupOptions>(quietOptions()));
    const at::Tensor tensor = at::ones({4});
    Works work = allReduce(*group, tensor);
    work->wait();
    group.reset();
    EXPECT_TRUE(work->isCompleted());  // a work outlives its group
    EXPECT_TRUE(work->isSuccess());
  });
  EXPECT_EQ(world.data->pending(), 0U);
}

TEST_F(LifecycleTest, TheLastOwnerMayBeACallbackOfAPartialAllReduce) {
  const World world(2);
  std::barrier<> sync_point(2);
  onRanks(2, [&](int rank) {
    auto group = makeBackend<ProcessGroupPrague>(rank, 2, world.inner(rank),
                                                 c10::make_intrusive<ProcessGroupPrague::Options>(seconds(60)));
    const std::weak_ptr<GroupHealth> health = group->health();
    if (rank == 0) {
      const Works work = group->partialAllReduce(at::ones({4}), {0, 1});
      work->getFuture()->addCallback([owner = group](c10::ivalue::Future&) {});
      group.reset();
    }
    sync_point.arrive_and_wait();
    if (rank == 1) {
      group->partialAllReduce(at::ones({4}), {0, 1})->wait();
      group.reset();
    }
    EXPECT_TRUE(soon([&] { return health.expired(); })) << "on rank " << rank;
  });
}

// A script that waits for its result and ends: the others' results are good, and they may still ask.
TEST_F(LifecycleTest, LeavingAfterTheLastCallFailsNobody) {
  for (int round = 0; round < 5; ++round) {
    const World world(3);
    onPlainGroups(world, quietOptions(), [&](DelegatingBackend& group, int rank) {
      const at::Tensor tensor = at::full({4}, rank + 1.0);
      EXPECT_EQ(errorOf([&] { allReduce(group, tensor)->wait(); }), "");
      EXPECT_TRUE(at::equal(tensor, at::full({4}, 6.0)));
      group.shutdown();
      EXPECT_FALSE(group.health()->failed()) << group.health()->reason().get().text;
    });
  }
}

TEST_F(LifecycleTest, AFutureHasTheErrorToo) {
  const World world(2);
  onPlainGroups(world, quietOptions(), [&](DelegatingBackend& group, int rank) {
    if (rank == 1) {
      EXPECT_TRUE(soon([&] { return group.health()->failed(); }));
      return;
    }
    const Works work = allReduce(group, at::ones({4}));
    const auto future = work->getFuture();
    std::atomic<int> called{0};
    future->addCallback([&](c10::ivalue::Future& over) {
      EXPECT_TRUE(over.hasError());
      ++called;
    });
    EXPECT_FALSE(future->completed());
    group.abort();
    EXPECT_TRUE(has(errorOf([&] { future->waitAndThrow(); }), "rank 0 called abort()"));
    EXPECT_TRUE(soon([&] { return called == 1; }));
    EXPECT_TRUE(has(errorOf([&] { work->wait(); }), "rank 0 called abort()"));
    EXPECT_TRUE(work->isCompleted());
    EXPECT_FALSE(work->isSuccess());
  });
}

// Whatever the survivors wait for, also for each other.
TEST_F(LifecycleTest, ADeathEndsEveryKindOfWait) {
  for (const std::string wait : {"work", "future", "recv", "recv of another"}) {
    const World world(4);
    onPlainGroups(world, quietOptions(), [&](DelegatingBackend& group, int rank) {
      group.barrier({})->wait();
      if (rank == 2) {
        std::this_thread::sleep_for(milliseconds(30));
        world.kill(2);
        return;
      }
      std::vector<at::Tensor> tensors{at::ones({10})};
      const std::string error = errorOf([&] {
        if (wait == "work") {
          allReduce(group, tensors[0])->wait();
        } else if (wait == "future") {
          allReduce(group, tensors[0])->getFuture()->waitAndThrow();
        } else {
          group.recv(tensors, wait == "recv" ? 2 : rank == 1 ? 0 : (rank + 1) % 4, 0)->wait();
        }
      });
      EXPECT_TRUE(has(error, "rank 2 died (connection closed)")) << wait << ": " << error;
      EXPECT_TRUE(wait != "recv" || has(error, ": recv with rank 2 (float32, 10 elements; ")) << error;
    });
  }
}

TEST_F(LifecycleTest, AWaitWithATimeOfItsOwnLeavesTheCall) {
  const World world(2);
  std::barrier<> sync_point(2);
  onPlainGroups(world, quietOptions(), [&](DelegatingBackend& group, int rank) {
    const at::Tensor tensor = at::full({4}, rank + 1.0);
    if (rank == 1) {
      sync_point.arrive_and_wait();
    }
    const Works work = allReduce(group, tensor);
    if (rank == 0) {
      const std::string error = errorOf([&] { work->wait(milliseconds(50)); });
      EXPECT_TRUE(has(error, "all_reduce #1") && has(error, "not complete after wait(50 ms)")) << error;
      sync_point.arrive_and_wait();
    }
    work->wait();
    EXPECT_TRUE(at::equal(tensor, at::full({4}, 3.0)));
  });
}

// Membership: what the others read in the store when a group has failed, or a worker has left it.
TEST_F(LifecycleTest, MembersSayInTheStoreThatTheyLiveOrLeave) {
  const World world(3);
  std::barrier<> sync_point(3);
  onRanks(3, [&](int rank) {
    const auto group = makeBackend<AttachableBackend>(rank, 3, "prague", world.inner(rank),
                                                      c10::make_intrusive<GroupOptions>(quietOptions()));
    group->announceMember(world.store, 10 + rank);
    sync_point.arrive_and_wait();
    EXPECT_EQ(world.store->getNumKeys(), 0);
    sync_point.arrive_and_wait();
    if (rank == 2) {  // its script ends
      group->announceLeaving();
      const OrderlyExitScope orderly_exit;
      group->health()->poison(2, "rank 2 failed");
      group->announceLeaving();
    }
    EXPECT_TRUE(soon([&] { return world.store->check({"alive/10", "alive/11", "gone/12"}); }));
    sync_point.arrive_and_wait();
    EXPECT_EQ(world.store->getNumKeys(), 3) << "one that leaves is not alive, and one that lives has not gone";
    EXPECT_EQ(group->health()->reason().lostRanks(), std::set<int>{2});
    sync_point.arrive_and_wait();
    group->withdrawAnnouncements();
    group->announceLeaving();
    EXPECT_FALSE(world.store->check({c10::str("gone/", 10 + (rank == 2 ? 0 : rank))}));
    // Who comes to a group that has failed already says so at once.
    group->announceMember(world.store, 20 + rank);
    EXPECT_TRUE(world.store->check({c10::str("alive/", 20 + rank)}));
    group->shutdown();
  });
}

TEST_F(LifecycleTest, ShutdownCallbacksRunOnceAndFirst) {
  const World world(2);
  onRanks(2, [&](int rank) {
    const auto group = makeBackend<AttachableBackend>(rank, 2, "prague", world.inner(rank),
                                                      c10::make_intrusive<GroupOptions>(quietOptions()));
    std::atomic<int> ran{0};
    std::uint64_t own = 0;
    own = group->addShutdownCallback([&] {
      EXPECT_TRUE(group->health()->usable()) << "a model leaves while the group works";
      group->removeShutdownCallback(own);  // not for itself
      ++ran;
    });
    const auto removed = group->addShutdownCallback([&] { ran += 100; });
    group->removeShutdownCallback(removed);
    EXPECT_FALSE(group->outwaitTraining([](milliseconds) { return false; })) << "outside shutdown()";
    group->shutdown();
    group->shutdown();
    EXPECT_EQ(ran, 1);
  });
}

// A rank waits in shutdown for workers that still train with it, until they have left or the group has failed.
TEST_F(LifecycleTest, ShutdownOutwaitsTraining) {
  for (const bool fails : {false, true}) {
    const World world(2);
    std::atomic<bool> left{false};
    onRanks(2, [&](int rank) {
      const auto group = makeBackend<AttachableBackend>(rank, 2, "prague", world.inner(rank),
                                                        c10::make_intrusive<GroupOptions>(quietOptions()));
      if (rank == 0) {
        group->addShutdownCallback([&] {
          EXPECT_TRUE(group->outwaitTraining([&](milliseconds limit) {
            std::this_thread::sleep_for(limit);
            return left.load();
          }));
          EXPECT_EQ(group->health()->failed(), fails);
        });
      } else {
        std::this_thread::sleep_for(milliseconds(150));
        left = !fails;
        if (fails) {
          group->abort();
        }
      }
      group->shutdown();
    });
  }
}

TEST_F(LifecycleTest, ARefusalEndsAllWaitsForConnections) {
  const World world(3);
  std::atomic<int> waiting{0};
  onRanks(3, [&](int rank) {
    ConnectingStore store(world.store);
    if (rank == 2) {
      EXPECT_TRUE(soon([&] { return waiting == 2; }));
      std::this_thread::sleep_for(milliseconds(30));
      store.refuse("rank 2 has no network");
      store.refuse("a second reason");
      return;
    }
    ++waiting;
    const std::string error = errorOf([&] { store.wait({"address of rank 2"}, seconds(30)); });
    EXPECT_TRUE(has(error, "rank 2 has no network")) << error;
    EXPECT_FALSE(has(error, "a second reason")) << error;
    EXPECT_TRUE(has(errorOf([&] { store.get("address of rank 2"); }), "rank 2 has no network"));
    store.set("address", std::vector<std::uint8_t>{1});
  });
}

}  // namespace
}  // namespace torchext
