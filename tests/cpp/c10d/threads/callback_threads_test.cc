#include "c10d/threads/callback_threads.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

namespace torchext {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr seconds kLimit{30};  // of what takes milliseconds

void await(const std::shared_future<void>& future) { ASSERT_EQ(future.wait_for(kLimit), std::future_status::ready); }

std::shared_future<void> post(
    CallbackThreads& threads, std::function<void()> task = [] {}, bool nested = CallbackThreads::here()) {
  auto done = std::make_shared<std::promise<void>>();
  std::shared_future<void> future = done->get_future().share();
  EXPECT_TRUE(threads.post(
      [task = std::move(task), done] {
        task();
        done->set_value();
      },
      nested));
  return future;
}

TEST(CallbackThreadsTest, TasksRunInOrderOneAtATime) {
  CallbackThreads threads({}, CallbackThreads::kMost, /*patience=*/kLimit);
  std::vector<int> order;  // without a lock: one at a time
  for (int i = 0; i < 1000; ++i) {
    post(threads, [&order, i] { order.push_back(i); });
  }
  EXPECT_TRUE(threads.finish(kLimit));
  std::vector<int> expected(1000);
  std::iota(expected.begin(), expected.end(), 0);
  EXPECT_EQ(order, expected);
}

TEST(CallbackThreadsTest, ATaskIsHereAndItsPosterIsNot) {
  CallbackThreads threads;
  bool here = false;
  await(post(threads, [&here] { here = CallbackThreads::here(); }));
  EXPECT_TRUE(here);
  EXPECT_FALSE(CallbackThreads::here());
}

// As a callback that makes a call and waits for its future, whose callback does the same.
TEST(CallbackThreadsTest, ATaskWaitsForThoseItPosts) {
  CallbackThreads threads;
  std::function<void(int)> descend = [&](int depth) {
    if (depth > 0) {
      await(post(threads, [&descend, depth] { descend(depth - 1); }));
    }
  };
  await(post(threads, [&] { descend(20); }));
}

TEST(CallbackThreadsTest, NestedTasksDoNotWaitForPatience) {
  constexpr milliseconds kPatience{200};
  CallbackThreads threads({}, CallbackThreads::kMost, kPatience);
  constexpr int kTasks = 200;
  await(post(threads, [&] { await(post(threads)); }));  // its threads have started
  const auto start = std::chrono::steady_clock::now();
  await(post(threads, [&] {
    post(
        threads, [] {}, /*nested=*/false);  // stands in the queue meanwhile
    for (int i = 0; i < kTasks; ++i) {
      await(post(threads));
    }
  }));
  EXPECT_LT(std::chrono::steady_clock::now() - start, kTasks * kPatience);
}

// A callback of the first call waits for the last: all but that stand in each other's way.
TEST(CallbackThreadsTest, TasksWaitForThoseBehindThem) {
  CallbackThreads threads;
  constexpr int kTasks = 12;
  std::vector<std::promise<void>> done(kTasks);
  std::vector<std::shared_future<void>> futures;
  for (auto& promise : done) {
    futures.push_back(promise.get_future().share());
  }
  for (int i = 0; i < kTasks; ++i) {
    post(threads, [&, i] {
      if (i + 1 < kTasks) {
        await(futures[static_cast<std::size_t>(i) + 1]);
      }
      done[static_cast<std::size_t>(i)].set_value();
    });
  }
  await(futures.front());
}

TEST(CallbackThreadsTest, NoMoreThreadsThanAllowed) {
  std::atomic<int> told{0};
  CallbackThreads threads([&told] { ++told; }, 3);
  std::promise<void> go;
  const std::shared_future<void> gone = go.get_future().share();
  std::atomic<int> running{0};
  std::atomic<int> most{0};
  std::vector<std::shared_future<void>> tasks;
  for (int i = 0; i < 10; ++i) {
    tasks.push_back(post(
        threads,
        [&] {
          const int now = ++running;
          for (int seen = most; seen < now && !most.compare_exchange_weak(seen, now);) {
          }
          await(gone);
          --running;
        },
        /*nested=*/true));
  }
  EXPECT_EQ(tasks.back().wait_for(milliseconds(50)), std::future_status::timeout);
  go.set_value();
  for (const auto& task : tasks) {
    await(task);
  }
  EXPECT_EQ(most, 3);
  EXPECT_LE(told, 1);
}

TEST(CallbackThreadsTest, FinishWaitsForWhatIsQueued) {
  CallbackThreads threads;
  std::atomic<int> done{0};
  for (int i = 0; i < 100; ++i) {
    post(threads, [&done] { ++done; });
  }
  EXPECT_TRUE(threads.finish(kLimit));
  EXPECT_EQ(done, 100);
  EXPECT_FALSE(threads.post([&done] { ++done; }, false));
  EXPECT_TRUE(threads.finish(milliseconds(0)));
  EXPECT_EQ(done, 100);
}

TEST(CallbackThreadsTest, FinishIsBoundedAndMayBeRepeated) {
  CallbackThreads threads;
  std::promise<void> go;
  const auto task = post(threads, [gone = go.get_future().share()] { await(gone); });
  EXPECT_FALSE(threads.finish(milliseconds(20)));
  go.set_value();
  await(task);
  EXPECT_TRUE(threads.finish(kLimit));
}

TEST(CallbackThreadsTest, ATaskMayFinishThem) {
  auto threads = std::make_unique<CallbackThreads>();
  std::atomic<int> done{0};
  bool finished = false;
  const auto task = post(*threads, [&] {
    for (int i = 0; i < 10; ++i) {
      post(*threads, [&done] { ++done; });
    }
    finished = threads->finish(kLimit);
  });
  await(task);
  EXPECT_TRUE(finished);
  EXPECT_EQ(done, 10);
}

TEST(CallbackThreadsTest, ATaskMayDestroyThem) {
  auto threads = std::make_shared<CallbackThreads>();
  std::promise<void> go;
  const auto task = post(*threads, [gone = go.get_future().share(), own = threads]() mutable {
    await(gone);
    own = nullptr;  // the last one
  });
  threads = nullptr;
  go.set_value();
  await(task);
}

TEST(CallbackThreadsTest, ABusyThreadOutlivesThem) {
  std::promise<void> go;
  std::shared_future<void> task;
  {
    CallbackThreads threads;
    task = post(threads, [gone = go.get_future().share()] { await(gone); });
  }
  go.set_value();
  await(task);
}

TEST(CallbackThreadsTest, ManyPosters) {
  CallbackThreads threads;
  std::atomic<int> done{0};
  std::vector<std::thread> posters;
  for (int p = 0; p < 4; ++p) {
    posters.emplace_back([&] {
      for (int i = 0; i < 500; ++i) {
        post(threads, [&] {
          if (++done % 50 == 0) {
            await(post(threads));
          }
        });
      }
    });
  }
  for (auto& poster : posters) {
    poster.join();
  }
  std::promise<void> all;
  post(threads, [&] {
    while (done < 2000) {
      std::this_thread::yield();
    }
    all.set_value();
  });
  await(all.get_future().share());
  EXPECT_TRUE(threads.finish(kLimit));
  EXPECT_EQ(done, 2000);
}

}  // namespace
}  // namespace torchext
