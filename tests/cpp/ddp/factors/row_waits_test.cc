// How the wait for rows ends that do not come, and what others can do meanwhile.
#include "ddp/factors/row_waits.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <stdexcept>
#include <string>
#include <thread>

#include "c10d/backend/process_group_dear.h"
#include "c10d/threads/interruptible_wait.h"
#include "embedding_model.h"
#include "kit/ranks_as_threads.h"

namespace torchext {
namespace {

using kit::errorOf;
using kit::has;
using kit::kSoon;
using kit::RanksTest;
using kit::World;
using std::chrono::steady_clock;

std::atomic<std::thread::id> signalled;
std::function<void()>& handler() {
  static std::function<void()> function;
  return function;
}

class RowWaitsTest : public RanksTest {
 protected:
  RowWaitsTest() {
    setSignalChecker([] {
      if (signalled.load() == std::this_thread::get_id()) {
        handler()();
      }
    });
  }
  ~RowWaitsTest() override {
    setSignalChecker(nullptr);
    signalled = std::thread::id();
  }
  // body(group, model, rank) on two ranks.
  template <class Body>
  void onTwo(const World& world, const Body& body) {
    onGroups<ProcessGroupDear>(world, ProcessGroupDear::Options(), [&](AttachableBackend& group, int rank) {
      const EmbeddingModel model(group);
      body(group, model, rank);
    });
  }
  static void pass(const EmbeddingModel& model, int rank, int step) {
    model.table.mutable_grad() = at::Tensor();
    model.backward(EmbeddingModel::indices(rank, step, 3), rank);
  }
  static void expectAverage(const EmbeddingModel& model, int step) {
    const EmbeddingModel::Plain all(at::kDouble);
    for (int rank = 0; rank < 2; ++rank) {
      all.backward(EmbeddingModel::indices(rank, step, 3), rank);
    }
    EXPECT_TRUE(at::allclose(model.table.grad(), all.mean(2), 1e-12)) << model.table.grad();
  }
};

TEST_F(RowWaitsTest, ASignalEndsTheWaitAndTheNextStepIsRight) {
  const World world(2);
  std::promise<void> interrupted;
  handler() = [] { throw std::runtime_error("interrupted"); };
  onTwo(world, [&](AttachableBackend&, const EmbeddingModel& model, int rank) {
    if (rank == 0) {
      signalled = std::this_thread::get_id();
      const auto begin = steady_clock::now();
      EXPECT_TRUE(has(errorOf([&] { pass(model, rank, 0); }), "interrupted"));
      EXPECT_LT(steady_clock::now() - begin, kSoon);
      signalled = std::thread::id();
      const std::string error = errorOf([&] { model.factors->backwardBegins(); });
      EXPECT_TRUE(has(error, "was interrupted while it waited")) << error;
      interrupted.set_value();
    } else {
      interrupted.get_future().wait();
      pass(model, rank, 0);  // the other's rows have left
      expectAverage(model, 0);
    }
    pass(model, rank, 1);
    expectAverage(model, 1);
    EXPECT_EQ(model.factors->stats().steps, 2);
  });
}

TEST_F(RowWaitsTest, WhatASignalEndsCanBeLeftAtOnce) {
  const World world(2, std::chrono::seconds(30));
  std::promise<void> left;
  handler() = [] { throw std::runtime_error("interrupted"); };
  onMade(
      2,
      [&](int rank) {
        return makeBackend<ProcessGroupDear>(rank, 2, world.inner(rank),
                                             c10::make_intrusive<ProcessGroupDear::Options>());
      },
      [&](ProcessGroupDear& group, int rank) {
        auto model = std::make_unique<EmbeddingModel>(group);
        if (rank == 1) {
          left.get_future().wait();
          return;
        }
        signalled = std::this_thread::get_id();
        EXPECT_TRUE(has(errorOf([&] { pass(*model, rank, 0); }), "interrupted"));
        signalled = std::thread::id();
        const auto begin = steady_clock::now();
        model.reset();
        EXPECT_LT(steady_clock::now() - begin, kSoon);
        group.shutdown();
        EXPECT_LT(steady_clock::now() - begin, kSoon);
        left.set_value();
      });
}

TEST_F(RowWaitsTest, OthersCanLookMeanwhile) {
  const World world(2);
  std::promise<void> looked;
  handler() = [] {};
  onTwo(world, [&](AttachableBackend&, const EmbeddingModel& model, int rank) {
    if (rank == 1) {
      looked.get_future().wait();
      pass(model, rank, 0);
      return;
    }
    std::thread other([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(150));
      const auto begin = steady_clock::now();
      EXPECT_EQ(model.factors->stats().steps, 0);
      EXPECT_LT(steady_clock::now() - begin, kSoon);
      looked.set_value();
    });
    pass(model, rank, 0);
    expectAverage(model, 0);
    other.join();
  });
}

TEST_F(RowWaitsTest, AHandlerThatCallsTheModelIsRefused) {
  const World world(2);
  std::promise<void> refused;
  onTwo(world, [&](AttachableBackend&, const EmbeddingModel& model, int rank) {
    if (rank == 0) {
      handler() = [&] {
        signalled = std::thread::id();
        const std::string error = errorOf([&] { model.factors->expect(true); });
        EXPECT_TRUE(has(error, "called by a signal's handler")) << error;
        refused.set_value();
      };
      signalled = std::this_thread::get_id();
    } else {
      refused.get_future().wait();
    }
    pass(model, rank, 0);
    expectAverage(model, 0);
  });
}

TEST_F(RowWaitsTest, AnEndOfTheGroupEndsTheWaitWithItsReason) {
  handler() = [] {};
  for (const bool dies : {false, true}) {
    const World world(2);
    std::promise<void> over;
    onTwo(world, [&](AttachableBackend& group, const EmbeddingModel& model, int rank) {
      if (rank == 1) {
        std::this_thread::sleep_for(std::chrono::milliseconds(200));
        dies ? world.kill(1) : group.abort();
        over.get_future().wait();
        return;
      }
      const auto begin = steady_clock::now();
      const std::string error = errorOf([&] { pass(model, rank, 0); });
      EXPECT_LT(steady_clock::now() - begin, std::chrono::milliseconds(200) + kSoon);
      EXPECT_TRUE(has(error, dies ? "rank 1" : "rank 1 called abort()")) << error;
      const std::string again = errorOf([&] { pass(model, rank, 1); });
      EXPECT_TRUE(has(again, dies ? "rank 1" : "rank 1 called abort()")) << again;
      over.set_value();
    });
  }
}

TEST_F(RowWaitsTest, AnotherThreadsAbortOfThisRank) {
  handler() = [] {};
  const World world(2);
  std::promise<void> over;
  onTwo(world, [&](AttachableBackend& group, const EmbeddingModel& model, int rank) {
    if (rank == 1) {
      over.get_future().wait();
      return;
    }
    std::thread other([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      group.abort();
    });
    const auto begin = steady_clock::now();
    const std::string error = errorOf([&] { pass(model, rank, 0); });
    EXPECT_LT(steady_clock::now() - begin, kSoon);
    EXPECT_TRUE(has(error, "rank 0 called abort()")) << error;
    other.join();
    over.set_value();
  });
}

}  // namespace
}  // namespace torchext
