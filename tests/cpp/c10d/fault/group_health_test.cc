// GroupHealth ends every wait of a group that fails or closes, with the first reason and no other.
#include "c10d/fault/group_health.h"
#include "c10d/fault/explain_error.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include "c10d/fault/group_waits.h"
#include "c10d/fault/orderly_exit_scope.h"
#include "c10d/fault/pending_operations.h"
#include "kit/ranks_as_threads.h"

namespace torchext {
namespace {

using kit::errorOf;
using kit::has;
using kit::soon;
using std::chrono::milliseconds;
using std::chrono::seconds;

class CountedOperation final : public PendingOperation {
 public:
  int interrupted = 0;
  int finished = 0;

 protected:
  std::function<void()> interrupt() override {
    ++interrupted;
    return [this] { ++finished; };
  }
};

bool never() { return false; }

TEST(PendingOperationsTest, InterruptsWhatIsOnTheList) {
  PendingOperations pending;
  CountedOperation first;
  CountedOperation second;
  CountedOperation background;
  CountedOperation refused;
  EXPECT_TRUE(pending.add(&first, {.name = "first"}, never));
  EXPECT_TRUE(pending.add(&second, {.name = "second"}, never));
  EXPECT_TRUE(pending.add(&background, {.name = "service", .background = true}, never));
  EXPECT_FALSE(pending.add(&refused, {.name = "late"}, [] { return true; }));
  pending.interruptBackground();
  EXPECT_EQ(background.interrupted, 1);
  EXPECT_EQ(first.interrupted, 0);
  pending.remove(&second);
  pending.remove(&second);
  pending.interruptAll();
  EXPECT_EQ(first.interrupted, 1);
  EXPECT_EQ(first.finished, 1) << "what remains is done after the list is free";
  EXPECT_EQ(background.interrupted, 2);
  EXPECT_EQ(second.interrupted + refused.interrupted, 0);
  pending.remove(&first);
  pending.remove(&background);
}

TEST(PendingOperationsTest, RemovesFromAnyPlace) {
  for (int removed = 0; removed < 3; ++removed) {
    PendingOperations pending;
    std::array<CountedOperation, 3> operations;
    for (auto& operation : operations) {
      pending.add(&operation, {.name = "operation"}, never);
    }
    pending.remove(&operations.at(static_cast<std::size_t>(removed)));
    pending.interruptAll();
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(operations.at(static_cast<std::size_t>(i)).interrupted, i == removed ? 0 : 1);
      pending.remove(&operations.at(static_cast<std::size_t>(i)));
    }
    EXPECT_TRUE(pending.waitUntilIdle(milliseconds(0)));
  }
}

TEST(PendingOperationsTest, KnowsTheOldestAndTheLate) {
  PendingOperations pending;
  const auto now = std::chrono::steady_clock::now();
  CountedOperation young;
  CountedOperation old;
  CountedOperation message;
  pending.add(&old, {.name = "old", .sequence = 3, .limit = seconds(100), .since = now - seconds(2)}, never);
  pending.add(&young, {.name = "young", .sequence = 4, .since = now - seconds(1)}, never);
  pending.add(&message, {.name = "message", .since = now - seconds(3)}, never);
  EXPECT_EQ(pending.oldestCollective({})->sequence, 3U);
  EXPECT_EQ(pending.oldestCollective(now - seconds(2))->sequence, 4U);
  EXPECT_FALSE(pending.oldestCollective(now));
  EXPECT_FALSE(pending.late());
  CountedOperation late;
  pending.add(&late, {.name = "late", .limit = milliseconds(1)}, never);
  std::this_thread::sleep_for(milliseconds(5));
  ASSERT_TRUE(pending.late());
  EXPECT_STREQ(pending.late()->name, "late");
  for (auto* operation : {&young, &old, &message, &late}) {
    pending.remove(operation);
  }
}

TEST(PendingOperationsTest, IsIdleBesideBackgroundWaits) {
  PendingOperations pending;
  CountedOperation service;
  CountedOperation call;
  pending.add(&service, {.name = "service", .background = true}, never);
  EXPECT_TRUE(pending.waitUntilIdle(milliseconds(0)));
  pending.add(&call, {.name = "call"}, never);
  EXPECT_FALSE(pending.waitUntilIdle(milliseconds(10)));
  EXPECT_TRUE(pending.waitUntilIdle(milliseconds(10), [] { return true; }));
  auto idle = std::async(std::launch::async, [&] { return pending.waitUntilIdle(kit::kSoon); });
  std::this_thread::sleep_for(milliseconds(20));
  pending.remove(&call);
  EXPECT_TRUE(idle.get());
  pending.remove(&service);
}

// Rank 0 of two, with nothing but its health; rank 1 sends when it is told to.
class GroupHealthTest : public kit::RanksTest {
 protected:
  c10::intrusive_ptr<c10d::Work> receive(int tag = 0) {
    std::vector<at::Tensor> tensors{received};
    return own->recv(tensors, 1, tag);
  }
  void send(int tag = 0) {
    std::vector<at::Tensor> tensors{at::ones({1})};
    sent.push_back(peer->send(tensors, 0, tag));
  }
  // The error of a wait on another thread.
  std::future<std::string> waiting(const OpInfo& op, milliseconds timeout = FailureMonitor::kForever) {
    auto result = std::async(std::launch::async, [this, op, timeout, work = receive()] {
      return errorOf([&] { waitPointToPoint(*health, work, timeout, op); });
    });
    std::this_thread::sleep_for(milliseconds(30));
    return result;
  }

  std::shared_ptr<kit::FakeNetwork> network = std::make_shared<kit::FakeNetwork>(2);
  c10::intrusive_ptr<c10d::Backend> own = network->connect(0);
  c10::intrusive_ptr<c10d::Backend> peer = network->connect(1);
  std::shared_ptr<GroupHealth> health = std::make_shared<GroupHealth>("prague", 0, 2);
  at::Tensor received = at::zeros({1});
  std::vector<c10::intrusive_ptr<c10d::Work>> sent;
};

TEST_F(GroupHealthTest, AMessageThatComesEndsItsWait) {
  auto error = waiting({.name = "recv", .peer = 1});
  send();
  EXPECT_EQ(error.get(), "");
  EXPECT_EQ(received.item<float>(), 1.0F);
}

TEST_F(GroupHealthTest, AFailureEndsAWait) {
  auto first = waiting({.name = "recv", .peer = 1});
  const auto start = std::chrono::steady_clock::now();
  EXPECT_TRUE(health->poison(1, "rank 1 is odd"));
  const std::string error = first.get();
  EXPECT_LT(std::chrono::steady_clock::now() - start, kit::kSoon);
  EXPECT_TRUE(has(error, "prague [rank 0 of 2]: recv with rank 1: rank 1 is odd; this group cannot be used")) << error;
  // The first reason stays, also for what comes later.
  EXPECT_FALSE(health->poison(0, "another reason"));
  EXPECT_EQ(health->reason().get(), (FirstReason::Reason{1, "rank 1 is odd"}));
  EXPECT_TRUE(has(errorOf([&] { health->checkUsable("all_reduce"); }), "all_reduce: rank 1 is odd"));
  EXPECT_TRUE(
      has(errorOf([&] { waitPointToPoint(*health, receive(1), seconds(1), {.name = "recv"}); }), "rank 1 is odd"));
  EXPECT_TRUE(
      has(errorOf([&] { waitUntil(*health, [](milliseconds) { return false; }, seconds(1), {.name = "look"}); }),
          "rank 1 is odd"));
}

// What is under way may still end well: its peer may just have left behind the last message.
TEST_F(GroupHealthTest, AGraceLetsMessagesCome) {
  auto error = waiting({.name = "recv", .peer = 1});
  std::thread failing([this] { health->poison(1, "rank 1 is odd", seconds(20)); });
  EXPECT_TRUE(soon([this] { return health->failed(); }));
  send();
  EXPECT_EQ(error.get(), "");
  failing.join();
}

TEST_F(GroupHealthTest, AbortEndsTheGraceOfAnother) {
  auto error = waiting({.name = "recv", .peer = 1});
  std::thread failing([this] { health->poison(1, "rank 1 is odd", seconds(20)); });
  EXPECT_TRUE(soon([this] { return health->failed(); }));
  const auto start = std::chrono::steady_clock::now();
  health->abort("rank 0 called abort()");
  EXPECT_TRUE(has(error.get(), "rank 1 is odd"));
  failing.join();
  EXPECT_LT(std::chrono::steady_clock::now() - start, kit::kSoon);
}

TEST_F(GroupHealthTest, AWaitThatPassesItsTimeNamesItself) {
  auto error = waiting({.name = "recv", .peer = 1}, milliseconds(100));
  const std::string text = error.get();
  EXPECT_TRUE(has(text, "rank 0 timed out in recv with rank 1: Timed out waiting 100ms")) << text;
  EXPECT_EQ(health->reason().get().rank, 0);
}

TEST_F(GroupHealthTest, WaitsForWhatIsNoMessage) {
  std::atomic<bool> there{false};
  auto arrived = std::async(std::launch::async, [&] {
    return errorOf(
        [&] { waitUntil(*health, [&](milliseconds) { return there.load(); }, seconds(30), {.name = "look"}); });
  });
  std::this_thread::sleep_for(milliseconds(20));
  there = true;
  EXPECT_EQ(arrived.get(), "");
  const auto nothing = [](milliseconds limit) {
    std::this_thread::sleep_for(limit);
    return false;
  };
  const std::string late = errorOf([&] { waitUntil(*health, nothing, milliseconds(50), {.name = "look", .peer = 1}); });
  EXPECT_TRUE(has(late, "rank 0 timed out in look with rank 1: Timed out waiting 50ms for look with rank 1")) << late;
}

// It is over, then: shutdown finds nothing under way.
TEST_F(GroupHealthTest, ALookMayThrow) {
  const auto look = [](milliseconds) -> bool { throw std::runtime_error("rank 1 has left"); };
  EXPECT_EQ(errorOf([&] { waitUntil(*health, look, seconds(30), {.name = "look", .peer = 1}); }), "rank 1 has left");
  health->close(milliseconds(0));
  EXPECT_FALSE(health->failed()) << health->reason().get().text;
}

TEST_F(GroupHealthTest, AFailureEndsAWaitForWhatIsNoMessage) {
  auto error = std::async(std::launch::async, [&] {
    return errorOf([&] {
      waitUntil(*health,
                [](milliseconds limit) {
                  std::this_thread::sleep_for(limit);
                  return false;
                },
                milliseconds(0), {.name = "look"});
    });
  });
  std::this_thread::sleep_for(milliseconds(30));
  health->poison(1, "rank 1 is odd");
  EXPECT_TRUE(has(error.get(), "look: rank 1 is odd"));
}

TEST_F(GroupHealthTest, ABrokenConnectionIsToldAsTheFaultMessage) {
  auto error = waiting({.name = "recv", .peer = 1});
  peer.reset();
  std::thread telling([this] {
    std::this_thread::sleep_for(milliseconds(30));
    health->receive({FaultMessage::Kind::kPeerDied, 1, 0, "connection closed"});
  });
  const std::string text = error.get();
  telling.join();
  EXPECT_TRUE(has(text, "recv with rank 1: rank 1 died (connection closed); seen here as: Connection closed by peer"))
      << text;
  EXPECT_EQ(health->reason().lostRanks(), std::set<int>{1});
}

TEST_F(GroupHealthTest, ABrokenConnectionWithoutAFaultMessageNamesThisRank) {
  auto error = waiting({.name = "recv", .peer = 1});
  peer.reset();
  const std::string text = error.get();
  EXPECT_TRUE(has(text, "rank 0 lost its connections in recv with rank 1: Connection closed by peer")) << text;
  EXPECT_TRUE(has(text, "has rank 1 left, or taken fewer steps?")) << text;
}

TEST_F(GroupHealthTest, ErrorsOfOthersKeepTheirText) {
  const OpInfo op{.name = "all_reduce", .sequence = 4};
  const auto own_error = std::make_exception_ptr(std::runtime_error("no such device"));
  EXPECT_TRUE(has(errorOf([&] { std::rethrow_exception(explain(*health, own_error, op)); }), "no such device"));
  EXPECT_FALSE(health->failed()) << "it is this rank's own";
  // Where the others wait for this call they must know.
  EXPECT_TRUE(has(errorOf([&] { std::rethrow_exception(explainToAll(*health, own_error, op)); }), "no such device"));
  EXPECT_EQ(health->reason().get().text, "rank 0 failed in all_reduce #4: no such device");
  EXPECT_EQ(health->reason().lostRanks(), std::set<int>{0});
}

TEST_F(GroupHealthTest, ShutdownEndsServicesAndLetsCallsEnd) {
  auto service = waiting({.name = "requests", .background = true});
  auto call = std::async(std::launch::async, [this, work = receive(7)] {
    return errorOf([&] { waitPointToPoint(*health, work, seconds(60), {.name = "recv", .peer = 1}); });
  });
  std::this_thread::sleep_for(milliseconds(30));
  std::thread closing([this] { health->close(seconds(20)); });
  EXPECT_TRUE(has(service.get(), "requests: the wait was ended by shutdown"));
  EXPECT_TRUE(has(errorOf([&] { health->checkUsable("send"); }), "send: the group was shut down"));
  EXPECT_TRUE(has(errorOf([&] { waitPointToPoint(*health, receive(8), seconds(1), {.name = "recv"}); }),
                  "the group was shut down"));
  // A part of a call that is under way goes on.
  send(9);
  EXPECT_EQ(errorOf([&] { waitPointToPoint(*health, receive(9), seconds(30), {.name = "part", .nested = true}); }), "");
  send(7);
  EXPECT_EQ(call.get(), "");
  closing.join();
  EXPECT_FALSE(health->failed());
}

TEST_F(GroupHealthTest, ShutdownFailsWhatDoesNotEnd) {
  auto call = waiting({.name = "recv", .peer = 1});
  health->close(milliseconds(50));
  EXPECT_TRUE(has(call.get(), "rank 0 shut the group down while operations were under way"));
  health->close(milliseconds(50));
}

TEST_F(GroupHealthTest, AbortCallbacksRunOnceAndConnectionsCloseLast) {
  std::atomic<int> ran{0};
  std::atomic<int> closed{0};
  health->onFailure().setConnectionCloser([&] {
    EXPECT_EQ(ran, 1);
    ++closed;
  });
  health->onFailure().add([&] { ++ran; });
  const auto removed = health->onFailure().add([&] { ran += 100; });
  health->onFailure().remove(removed);
  health->onFailure().remove(removed);
  health->poison(1, "rank 1 is odd");
  health->abort("again");
  EXPECT_EQ(ran, 1);
  EXPECT_EQ(closed, 1);
  EXPECT_EQ(health->onFailure().add([&] { ++ran; }), 0U);
  EXPECT_EQ(ran, 2) << "at once when the group has failed";
}

TEST_F(GroupHealthTest, RemovingACallbackWaitsForIt) {
  std::promise<void> running;
  std::promise<void> go_on;
  std::atomic<bool> over{false};
  const auto id = health->onFailure().add([&] {
    running.set_value();
    go_on.get_future().wait();
    over = true;
  });
  std::uint64_t own_id = 0;
  own_id = health->onFailure().add([&] { health->onFailure().remove(own_id); });  // not for itself
  std::thread failing([this] { health->poison(1, "rank 1 is odd"); });
  running.get_future().wait();
  std::thread releasing([&] {
    std::this_thread::sleep_for(milliseconds(50));
    go_on.set_value();
  });
  health->onFailure().remove(id);
  EXPECT_TRUE(over);
  failing.join();
  releasing.join();
}

TEST_F(GroupHealthTest, SettingTheCloserWaitsForOneThatRuns) {
  std::promise<void> running;
  std::atomic<bool> over{false};
  health->onFailure().setConnectionCloser([&] {
    running.set_value();
    std::this_thread::sleep_for(milliseconds(50));
    over = true;
  });
  std::thread failing([this] { health->poison(1, "rank 1 is odd"); });
  running.get_future().wait();
  health->onFailure().setConnectionCloser(nullptr);
  EXPECT_TRUE(over);
  failing.join();
}

TEST_F(GroupHealthTest, WhoLeavesCountsAsLost) {
  {
    const OrderlyExitScope orderly_exit;
    health->poison(0, "rank 0 leaves");
  }
  EXPECT_EQ(health->reason().lostRanks(), std::set<int>{0});
  health->reason().noteLost(1);
  EXPECT_EQ(health->reason().lostRanks(), (std::set<int>{0, 1}));
  EXPECT_EQ(health->reason().get().text, "rank 0 leaves");
}

TEST_F(GroupHealthTest, AnOperationHasALimit) {
  auto call = waiting({.name = "recv", .peer = 1, .nested = true, .limit = milliseconds(50)});
  std::this_thread::sleep_for(milliseconds(50));
  health->expire();
  const std::string error = call.get();
  EXPECT_TRUE(has(error, "rank 0 timed out in recv with rank 1: Timed out waiting 50ms for all ranks")) << error;
}

}  // namespace
}  // namespace torchext
