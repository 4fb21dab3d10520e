// DearPlanner with the buckets of a plan: what it keeps of them, and after how many steps it has decided.
#include "ddp/dear/dear_planner.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
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

// So many steps; those in which all-reduce is used or not, as `slow_allreduce` says, take longer.
void train(DearPlanner& planner, int steps, const Order& observed, bool slow_allreduce) {
  for (int step = 0; step < steps; ++step) {
    const bool slow = planner.plan().allreduce == slow_allreduce;
    std::this_thread::sleep_for(milliseconds(slow ? 8 : 1));
    planner.afterStep(observed, {});
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

}  // namespace
}  // namespace torchext::kit
