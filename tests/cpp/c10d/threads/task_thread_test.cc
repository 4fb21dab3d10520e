#include "c10d/threads/task_thread.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <thread>
#include <vector>

namespace torchext {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr seconds kLimit{30};  // of what takes milliseconds

TEST(TaskThreadTest, WhatIsForIdleTimesRunsOnceAfterWhatWasPosted) {
  TaskThread thread("test");
  std::vector<int> order;  // of the thread
  std::promise<void> done;
  thread.whenIdle(milliseconds(1), [&] {
    order.push_back(3);
    done.set_value();
  });
  for (int i = 0; i < 3; ++i) {
    thread.post([&order, i] { order.push_back(i); });
  }
  ASSERT_EQ(done.get_future().wait_for(kLimit), std::future_status::ready);
  EXPECT_TRUE(thread.finish(kLimit));
  EXPECT_EQ(order.back(), 3);
}

TEST(TaskThreadTest, ALaterOneTakesThePlaceOfTheFormer) {
  TaskThread thread("test");
  std::atomic<int> former{0};
  std::promise<void> done;
  for (int i = 0; i < 100; ++i) {
    thread.whenIdle(seconds(60), [&former] { ++former; });
  }
  thread.whenIdle(milliseconds(1), [&done] { done.set_value(); });
  ASSERT_EQ(done.get_future().wait_for(kLimit), std::future_status::ready);
  EXPECT_EQ(former, 0);
}

TEST(TaskThreadTest, NeitherEndWaitsForWhatIsForIdleTimes) {
  auto held = std::make_shared<int>(0);
  const std::weak_ptr<int> watched = held;
  {
    TaskThread thread("test");
    thread.whenIdle(std::chrono::hours(1), [held = std::move(held)] { ++*held; });
    EXPECT_TRUE(thread.finish(kLimit));
  }
  EXPECT_TRUE(watched.expired());
  TaskThread thread("test");
  thread.whenIdle(std::chrono::hours(1), [] {});
  thread.discard();
}

TEST(TaskThreadTest, WhatIsForIdleTimesMayPost) {
  TaskThread thread("test");
  std::promise<void> done;
  thread.whenIdle(milliseconds(1), [&] { thread.post([&done] { done.set_value(); }); });
  ASSERT_EQ(done.get_future().wait_for(kLimit), std::future_status::ready);
}

TEST(TaskThreadTest, ManyThreadsSetAndPost) {
  TaskThread thread("test");
  std::atomic<int> ran{0};
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([&] {
      for (int k = 0; k < 500; ++k) {
        thread.whenIdle(milliseconds(k % 2), [] {});
        thread.post([&ran] { ++ran; });
      }
    });
  }
  for (std::thread& caller : callers) {
    caller.join();
  }
  EXPECT_TRUE(thread.finish(kLimit));
  EXPECT_EQ(ran, 2000);
}

TEST(TaskThreadTest, ATaskMayDestroyIt) {
  auto thread = std::make_shared<TaskThread>("test");
  std::promise<void> go;
  std::promise<void> done;
  thread->post([&done, gone = go.get_future().share(), own = thread]() mutable {
    gone.wait();
    own = nullptr;  // the last one
    done.set_value();
  });
  thread = nullptr;
  go.set_value();
  EXPECT_EQ(done.get_future().wait_for(kLimit), std::future_status::ready);
}

}  // namespace
}  // namespace torchext
