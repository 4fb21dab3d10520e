// DearPlanner with the buckets of a plan: what it keeps of them, and after how many steps it has decided, whatever
// steps a rank takes by itself.
#include "ddp/dear/dear_planner.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "c10d/backend/process_group_dear.h"
#include "kit/ranks_as_threads.h"

namespace torchext::kit {
namespace {

using Order = std::vector<std::int64_t>;

const Order kTensors{0, 1, 2, 3};
const Order kReversed{3, 2, 1, 0};
constexpr std::size_t kBytes = 1000;
constexpr int kWarmUp = 11;       // steps
constexpr int kConfirming = 66;   // three windows of each
constexpr int kTrialsBegin = 22;  // a window of warm-up, one of all-reduce

DearPlan twoBuckets() {
  DearPlan plan;
  plan.ends = {1, 4};
  plan.gradient_order = kReversed;
  plan.forward_order = {1, 0, 2, 3};
  return plan;
}

ProcessGroupDear::Options optionsWith(bool fallback) {
  ProcessGroupDear::Options options(seconds(60));
  options.allreduce_fallback = fallback;
  return options;
}

// The end of a pass that averages.
void endPass(DearPlanner& planner, const Order& observed) {
  if (planner.afterPass()) {
    planner.decide(observed, {});
  }
}

// So many passes that average, a step behind each where `steps` says so of their numbers; those in which all-reduce is
// used or not, as `slow_allreduce` says, take longer.
void train(
    DearPlanner& planner, int passes, const Order& observed, bool slow_allreduce,
    const std::function<bool(int pass)>& steps = [](int) { return true; }) {
  for (int pass = 0; pass < passes; ++pass) {
    planner.adopt();
    const bool slow = planner.plan().allreduce == slow_allreduce;
    std::this_thread::sleep_for(milliseconds(slow ? 8 : 1));
    endPass(planner, observed);
    if (steps(pass)) {
      planner.afterStep();
      planner.adopt();
    }
  }
}

class DearPlannerTest : public RanksTest {};

TEST_F(DearPlannerTest, PlannedBucketsStayWhereTheyAreFaster) {
  const World world(2);
  onGroups<ProcessGroupDear>(world, optionsWith(true), [](ProcessGroupDear& group, int rank) {
    DearPlanner planner(group, kBytes, kTensors, 0, twoBuckets());
    EXPECT_TRUE(planner.plan().allreduce);
    train(planner, kWarmUp + kConfirming - 1, kReversed, true);
    EXPECT_FALSE(planner.decided());
    train(planner, 1, kReversed, true);
    EXPECT_TRUE(planner.decided());
    EXPECT_FALSE(planner.plan().allreduce);
    EXPECT_EQ(planner.plan().ends, twoBuckets().ends);
    EXPECT_EQ(planner.plan().gradient_order, kReversed);
    EXPECT_EQ(planner.plan().forward_order, twoBuckets().forward_order);
    EXPECT_TRUE(planner.trials().trials.empty());
    EXPECT_EQ(planner.allreduceSeconds() > 0, rank == 0);
  });
}

TEST_F(DearPlannerTest, PlannedBucketsGoWhereTheyAreSlower) {
  const World world(2);
  onGroups<ProcessGroupDear>(world, optionsWith(true), [](ProcessGroupDear& group, int) {
    DearPlanner planner(group, kBytes, kTensors, 0, twoBuckets());
    train(planner, kWarmUp + kConfirming, kReversed, false);
    EXPECT_TRUE(planner.decided());
    EXPECT_TRUE(planner.plan().allreduce);
  });
}

TEST_F(DearPlannerTest, ADifferentOrderOnRankZeroBeginsTheTrials) {
  const World world(2);
  onGroups<ProcessGroupDear>(world, optionsWith(true), [](ProcessGroupDear& group, int rank) {
    DearPlanner planner(group, kBytes, kTensors, 0, twoBuckets());
    const Order seen = rank == 0 ? kTensors : kReversed;
    train(planner, kWarmUp, seen, true);
    EXPECT_TRUE(planner.plan().ends.empty());
    EXPECT_EQ(planner.plan().gradient_order, kTensors);
    train(planner, kTrialsBegin - kWarmUp, seen, true);
    EXPECT_FALSE(planner.plan().allreduce);
    EXPECT_FALSE(planner.decided());
    train(planner, kWarmUp, seen, true);
    EXPECT_EQ(planner.trials().trials.size(), rank == 0 ? 1U : 0U);
  });
}

TEST_F(DearPlannerTest, WithoutTheFallbackPlannedBucketsAreUsedAtOnce) {
  const World world(2);
  onGroups<ProcessGroupDear>(world, optionsWith(false), [](ProcessGroupDear& group, int) {
    DearPlanner planner(group, kBytes, kTensors, 0, twoBuckets());
    EXPECT_FALSE(planner.plan().allreduce);
    train(planner, kWarmUp, {3, 0, 1, 2}, true);  // in another order within a bucket
    EXPECT_TRUE(planner.decided());
    EXPECT_EQ(planner.plan().ends, twoBuckets().ends);
    EXPECT_EQ(planner.plan().gradient_order, kReversed);
  });
}

TEST_F(DearPlannerTest, ARankMaySkipStepsAlone) {
  const World world(3);
  onGroups<ProcessGroupDear>(world, optionsWith(true), [](ProcessGroupDear& group, int rank) {
    DearPlanner planner(group, kBytes, kTensors, 0, twoBuckets());
    // Rank 1 those in front of which is decided, rank 2 each third.
    const auto steps = [rank](int pass) {
      return rank == 0 || (rank == 1 ? pass % kWarmUp != kWarmUp - 1 : pass % 3 != 0);
    };
    train(planner, kWarmUp + kConfirming - 1, kReversed, true, steps);
    EXPECT_FALSE(planner.decided());
    train(planner, 1, kReversed, true);
    EXPECT_TRUE(planner.decided());
    EXPECT_FALSE(planner.plan().allreduce);
  });
}

TEST_F(DearPlannerTest, WhereRankZeroHasSkippedAStepTheWindowIsAsLongAgain) {
  const World world(2);
  onGroups<ProcessGroupDear>(world, optionsWith(true), [](ProcessGroupDear& group, int rank) {
    DearPlanner planner(group, kBytes, kTensors, 0, twoBuckets());
    const auto steps = [rank](int pass) { return rank != 0 || pass != kWarmUp + 4; };
    train(planner, 2 * kWarmUp + kConfirming - 1, kReversed, true, steps);
    EXPECT_FALSE(planner.decided());
    train(planner, 1, kReversed, true);
    EXPECT_TRUE(planner.decided());
  });
}

TEST_F(DearPlannerTest, WithoutStepsThereIsNoDecision) {
  const World world(2);
  onGroups<ProcessGroupDear>(world, optionsWith(true), [](ProcessGroupDear& group, int rank) {
    DearPlanner planner(group, kBytes, kTensors, 0, twoBuckets());
    train(planner, 5 * kWarmUp, kReversed, true, [rank](int) { return rank != 0; });
    EXPECT_TRUE(planner.plan().allreduce);
    EXPECT_FALSE(planner.decided());
  });
}

TEST_F(DearPlannerTest, SeveralPassesOfOneStepAreMeasuredAsOne) {
  const World world(2);
  onGroups<ProcessGroupDear>(world, optionsWith(true), [](ProcessGroupDear& group, int rank) {
    DearPlanner planner(group, kBytes, kTensors, 0, twoBuckets());
    const auto second = [](int pass) { return pass % 2 == 1; };
    train(planner, 2 * (kWarmUp + kConfirming) - 1, kReversed, true, second);
    EXPECT_FALSE(planner.decided());
    train(planner, 1, kReversed, true);
    EXPECT_TRUE(planner.decided());
    EXPECT_FALSE(planner.plan().allreduce);
    EXPECT_EQ(planner.allreduceSeconds() >= 16e-3, rank == 0);
  });
}

TEST_F(DearPlannerTest, WhatIsDecidedIsInUseOnceItIsAdopted) {
  const World world(2);
  onGroups<ProcessGroupDear>(world, optionsWith(true), [](ProcessGroupDear& group, int) {
    DearPlanner planner(group, kBytes, kTensors, 0, twoBuckets());
    train(planner, kWarmUp - 1, kReversed, true);
    train(planner, kWarmUp, kReversed, true);
    endPass(planner, kReversed);
    EXPECT_TRUE(planner.plan().allreduce);
    EXPECT_TRUE(planner.adopt());
    EXPECT_FALSE(planner.plan().allreduce);
    EXPECT_FALSE(planner.adopt());
  });
}

TEST_F(DearPlannerTest, ADecisionIsTakenBackByStepsThatAreSlowerLater) {
  const World world(2);
  onGroups<ProcessGroupDear>(world, optionsWith(true), [](ProcessGroupDear& group, int rank) {
    DearPlanner planner(group, kBytes, kTensors, 0, twoBuckets());
    const auto steps = [rank](int pass) { return rank == 0 || pass % 7 != 0; };
    train(planner, kWarmUp + kConfirming, kReversed, true, steps);
    EXPECT_TRUE(planner.decided());
    EXPECT_FALSE(planner.settled());
    train(planner, 40, kReversed, true, steps);
    for (int pass = 0; pass < 60; ++pass) {
      EXPECT_FALSE(planner.plan().allreduce);
      std::this_thread::sleep_for(milliseconds(12));
      train(planner, 1, kReversed, true, steps);
    }
    planner.adopt();
    EXPECT_TRUE(planner.plan().allreduce);
    train(planner, kConfirming, kReversed, false, steps);
    EXPECT_TRUE(planner.settled());
    EXPECT_TRUE(planner.plan().allreduce);
  });
}

}  // namespace
}  // namespace torchext::kit
