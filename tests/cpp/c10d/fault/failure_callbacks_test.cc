// FirstReason and FailureCallbacks, which need no torch: ThreadSanitizer sees everything.
#include "c10d/fault/failure_callbacks.h"

#include <atomic>
#include <chrono>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

namespace torchext {
namespace {

using Kind = FirstReason::Kind;
using std::chrono::milliseconds;

TEST(FirstReason, TheFirstWriterFixesTheReason) {
  FirstReason reason;
  EXPECT_FALSE(reason.isSet());
  EXPECT_EQ(reason.get().rank, -1);
  EXPECT_EQ(reason.get().text, "");
  std::atomic<int> firsts{0};
  std::vector<std::thread> writers;
  for (int rank = 0; rank < 8; ++rank) {
    writers.emplace_back([&, rank] { firsts += reason.set(Kind::kFailure, rank, "rank " + std::to_string(rank)); });
  }
  for (std::thread& writer : writers) {
    writer.join();
  }
  EXPECT_EQ(firsts, 1);
  EXPECT_TRUE(reason.isSet());
  EXPECT_EQ(reason.get().text, "rank " + std::to_string(reason.get().rank));
  EXPECT_FALSE(reason.set(Kind::kAbort, 9, "later"));
  EXPECT_EQ(reason.kind(), Kind::kFailure);
}

TEST(FirstReason, WhoDiedOrLeftIsLostAndOthersAreNot) {
  FirstReason failed;
  failed.set(Kind::kFailure, 1, "gave up");
  EXPECT_TRUE(failed.lostRanks().empty());
  failed.noteLost(2);  // found dead after the first reason
  EXPECT_EQ(failed.lostRanks(), std::set<int>{2});
  FirstReason died;
  died.set(Kind::kPeerDied, 1, "its connection closed");
  FirstReason left;
  left.set(Kind::kDeparture, 3, "left");
  EXPECT_EQ(died.lostRanks(), std::set<int>{1});
  EXPECT_EQ(left.lostRanks(), std::set<int>{3});
}

TEST(FirstReason, AWaitEndsWithTheReasonOrTheLimit) {
  FirstReason reason;
  EXPECT_FALSE(reason.waitUntilSet(milliseconds(1)));
  auto waits = std::async(std::launch::async, [&] { return reason.waitUntilSet(std::chrono::seconds(30)); });
  reason.set(Kind::kFailure, 0, "over");
  EXPECT_TRUE(waits.get());
}

TEST(FailureCallbacks, EachRunsOnceAndThenTheCloser) {
  FirstReason reason;
  FailureCallbacks callbacks(reason);
  std::string order;
  callbacks.add([&] { order += "a"; });
  callbacks.add([&] { order += "b"; });
  callbacks.setConnectionCloser([&] { order += "|"; });
  reason.set(Kind::kFailure, 0, "over");
  callbacks.run();
  callbacks.run();
  EXPECT_EQ(order, "ab|");
}

TEST(FailureCallbacks, OneThatIsAddedAfterTheFailureRunsAtOnce) {
  FirstReason reason;
  FailureCallbacks callbacks(reason);
  reason.set(Kind::kFailure, 0, "over");
  bool ran = false;
  EXPECT_EQ(callbacks.add([&] { ran = true; }), 0U);
  EXPECT_TRUE(ran);
}

TEST(FailureCallbacks, NoneIsLostBetweenTheReasonAndTheRun) {
  for (int round = 0; round < 200; ++round) {
    FirstReason reason;
    FailureCallbacks callbacks(reason);
    std::atomic<int> ran{0};
    std::thread adds([&] {
      for (int i = 0; i < 20; ++i) {
        callbacks.add([&] { ++ran; });
      }
    });
    reason.set(Kind::kFailure, 0, "over");
    callbacks.run();
    adds.join();
    EXPECT_EQ(ran, 20);
  }
}

TEST(FailureCallbacks, RemoveWaitsForOneThatRunsButNotForItself) {
  FirstReason reason;
  FailureCallbacks callbacks(reason);
  std::promise<void> begun;
  std::promise<void> may_end;
  std::atomic<bool> ended{false};
  const auto slow = callbacks.add([&] {
    begun.set_value();
    may_end.get_future().wait();
    ended = true;
  });
  std::uint64_t own = 0;
  own = callbacks.add([&] { callbacks.remove(own); });
  reason.set(Kind::kFailure, 0, "over");
  std::thread runs([&] { callbacks.run(); });
  begun.get_future().wait();
  auto removed = std::async(std::launch::async, [&] { callbacks.remove(slow); });
  EXPECT_EQ(removed.wait_for(milliseconds(20)), std::future_status::timeout);
  may_end.set_value();
  removed.get();
  EXPECT_TRUE(ended);
  runs.join();
}

TEST(FailureCallbacks, OneThatWasRemovedDoesNotRun) {
  FirstReason reason;
  FailureCallbacks callbacks(reason);
  bool ran = false;
  callbacks.remove(callbacks.add([&] { ran = true; }));
  callbacks.remove(77);  // never added
  reason.set(Kind::kFailure, 0, "over");
  callbacks.run();
  EXPECT_FALSE(ran);
}

TEST(FailureCallbacks, ANewCloserWaitsForTheOldOneToEnd) {
  FirstReason reason;
  FailureCallbacks callbacks(reason);
  std::promise<void> begun;
  std::promise<void> may_end;
  callbacks.setConnectionCloser([&] {
    begun.set_value();
    may_end.get_future().wait();
  });
  reason.set(Kind::kFailure, 0, "over");
  std::thread runs([&] { callbacks.run(); });
  begun.get_future().wait();
  auto replaced = std::async(std::launch::async, [&] { callbacks.setConnectionCloser(nullptr); });
  EXPECT_EQ(replaced.wait_for(milliseconds(20)), std::future_status::timeout);
  may_end.set_value();
  replaced.get();
  runs.join();
  callbacks.run();
}

}  // namespace
}  // namespace torchext
