#include "step_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "core/base/check.h"
#include "core/base/random.h"

namespace torchext::core::testing {
namespace {

using Sizes = std::vector<std::size_t>;
using Indices = std::vector<int>;

TEST(StepModel, GathersFollowTheForwardOrder) {
  const BucketPlan plan = BucketPlan::fromEnds({1, 1, 1, 1, 1, 1, 1}, {1, 3, 5, 7});
  // Call 1 runs out of the registered order, tensor 6 is tied (calls 0 and 3), nobody reads bucket 0.
  const GatherSchedule schedule = gatherSchedule(plan, {{6, 5}, {1}, {}, {4, 6, 2}});
  EXPECT_EQ(schedule.order, (Indices{3, 1, 2, 0}));
  EXPECT_EQ(schedule.waits_for, (std::vector<Indices>{{3}, {1}, {}, {1, 2, 3}}));
}

TEST(StepModel, TheTimelineOfTwoBuckets) {
  // Reduce-scatter: 0 from 2 to 2+1+4, then 1 (ready at 3) to 7+1+2. Forward waits for bucket 1, then 0.
  const BucketPlan plan = BucketPlan::fromEnds({1, 3, 2}, {2, 3});
  StepModel model;
  model.reduce_scatter = {1, 1};
  model.all_gather = {0.5, 0.5};
  model.ready = {1, 2, 3};
  model.backward_seconds = 4;
  model.forward_seconds = {0.25, 5, 1};
  model.forward_tensors = {{2}, {}, {1, 0}};
  const StepTimes times = predictStep(plan, model);
  EXPECT_DOUBLE_EQ(reduceScatterEnd(plan, model.ready, model.reduce_scatter), 10);
  EXPECT_DOUBLE_EQ(times.reduce_scatter_end, 10);
  EXPECT_DOUBLE_EQ(times.all_gather_end, 10 + 1.5 + 2.5);
  // Bucket 1 at 11.5, call 0 to 11.75, call 1 hides the other all-gather, call 2.
  EXPECT_DOUBLE_EQ(times.forward_end, 11.5 + 0.25 + 5 + 1);
  // A short call 1 does not hide it; a long backward pass hides all reduce-scatters.
  model.forward_seconds[1] = 0;
  EXPECT_DOUBLE_EQ(predictStep(plan, model).forward_end, 14 + 1);
  model.backward_seconds = 30;
  EXPECT_DOUBLE_EQ(predictStep(plan, model).forward_end, 30 + 4 + 1);
}

// Every partition of L tensors is a set of ends among 1..L-1: a bit each.
double bruteForce(const Sizes& bytes, const std::vector<double>& ready, const AlphaBeta& cost) {
  const int tensors = static_cast<int>(bytes.size());
  double best = std::numeric_limits<double>::infinity();
  for (unsigned bits = 0; bits < 1U << index(tensors - 1); ++bits) {
    double finish = 0;
    double sum = 0;
    for (int tensor = 0; tensor < tensors; ++tensor) {
      sum += static_cast<double>(bytes[index(tensor)]);
      if (tensor == tensors - 1 || (bits >> index(tensor) & 1U) != 0) {
        finish = std::max(finish, ready[index(tensor)]) + cost.alpha + cost.beta * sum;
        sum = 0;
      }
    }
    best = std::min(best, finish);
  }
  return best;
}

TEST(OptimalFusion, IsTheBestOfAllPartitions) {
  Random random(3);
#ifdef TORCHEXT_SANITIZED
  constexpr int kRounds = 120;
#else
  constexpr int kRounds = 600;
#endif
  int inner = 0;
  for (int round = 0; round < kRounds; ++round) {
    Sizes bytes(1 + random.below(12));
    std::vector<double> ready;
    double now = 0;
    for (auto& size : bytes) {
      size = random.below(1000);
      now += random.uniform() * (random.below(4) == 0 ? 0 : 1);  // some gradients are finished together
      ready.push_back(now);
    }
    const AlphaBeta cost{random.uniform() * 0.7, random.uniform() * 2e-3};
    const OptimalFusion optimum = optimalFusion(bytes, ready, cost);
    ASSERT_NEAR(optimum.reduce_scatter_end, bruteForce(bytes, ready, cost), 1e-9);
    ASSERT_NEAR(reduceScatterEnd(optimum.plan, ready, cost), optimum.reduce_scatter_end, 1e-9);
    const int buckets = optimum.plan.bucketCount();
    inner += buckets > 1 && buckets < optimum.plan.tensorCount() ? 1 : 0;
  }
  EXPECT_GT(inner, kRounds / 2);  // the inputs are such that something is to be decided
}

TEST(OptimalFusion, ExtremesAreOneBucketAndOneATensor) {
  const Sizes bytes(30, 100);
  std::vector<double> ready(30);
  std::iota(ready.begin(), ready.end(), 0.0);
  EXPECT_EQ(optimalFusion(bytes, ready, {1000, 1e-9}).plan.bucketCount(), 1);
  const OptimalFusion fine = optimalFusion(bytes, ready, {0, 9e-3});
  EXPECT_DOUBLE_EQ(fine.reduce_scatter_end, 29 + 0.9);  // all but the last tensor hidden
  EXPECT_EQ(fine.plan.bucket(fine.plan.bucketCount() - 1).count, 1);
}

}  // namespace
}  // namespace torchext::core::testing
