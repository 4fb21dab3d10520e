#include "core/bucket_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "core/check.h"
#include "core/random.h"
#include "expect_throw.h"

namespace torchext::core {
namespace {

using Sizes = std::vector<std::size_t>;
using Indices = std::vector<int>;

TEST(BucketPlan, FusesUpToTheLimit) {
  const BucketPlan plan({4, 4, 4, 9, 1, 2, 0, 5, 20, 3}, 8);
  const std::vector<Bucket> expected{{0, 2, 8}, {2, 1, 4}, {3, 1, 9}, {4, 4, 8}, {8, 1, 20}, {9, 1, 3}};
  ASSERT_EQ(plan.bucketCount(), 6);
  for (int i = 0; i < plan.bucketCount(); ++i) {
    EXPECT_EQ(plan.bucket(i), expected[index(i)]) << i;
  }
  EXPECT_EQ(plan.bucketOf(0), 0);
  EXPECT_EQ(plan.bucketOf(7), 3);
  EXPECT_EQ(plan.bucketOf(9), 5);
  EXPECT_EQ(plan.offsetBytes(1), 4U);
  EXPECT_EQ(plan.offsetBytes(2), 0U);
  EXPECT_EQ(plan.offsetBytes(7), 3U);
  EXPECT_EQ(plan.tensorBytes(8), 20U);
  EXPECT_EQ(plan.totalBytes(), 52U);
  EXPECT_EQ(plan.meanBucketBytes(), 9U);  // 52 / 6, rounded up
}

TEST(BucketPlan, BucketsAreRunsWithinTheLimitThatCannotGrow) {
  Random random(1);
  for (int round = 0; round < 200; ++round) {
    Sizes bytes(1 + random.below(40));
    for (auto& size : bytes) {
      size = random.below(100);
    }
    const std::size_t limit = 1 + random.below(200);
    const BucketPlan plan(bytes, limit);
    int next = 0;
    for (int i = 0; i < plan.bucketCount(); ++i) {
      const Bucket& bucket = plan.bucket(i);
      ASSERT_EQ(bucket.first, next);
      ASSERT_GT(bucket.count, 0);
      std::size_t sum = 0;
      for (int tensor = bucket.first; tensor < bucket.first + bucket.count; ++tensor) {
        ASSERT_EQ(plan.bucketOf(tensor), i);
        ASSERT_EQ(plan.offsetBytes(tensor), sum);
        sum += bytes[index(tensor)];
      }
      ASSERT_EQ(bucket.bytes, sum);
      ASSERT_TRUE(sum <= limit || bucket.count == 1);
      next += bucket.count;
      ASSERT_TRUE(next == plan.tensorCount() || sum + bytes[index(next)] > limit);
    }
    ASSERT_EQ(next, plan.tensorCount());
  }
}

TEST(BucketPlan, AHugeLimitDoesNotWrap) {
  constexpr std::size_t kMost = std::numeric_limits<std::size_t>::max();
  EXPECT_EQ(BucketPlan({5, kMost - 4, 1}, kMost).bucketCount(), 2);
  EXPECT_EQ(BucketPlan({5, kMost - 5}, kMost).bucketCount(), 1);
}

TEST(BucketPlan, FromEnds) {
  const BucketPlan plan = BucketPlan::fromEnds({1, 2, 3, 4}, {1, 4});
  ASSERT_EQ(plan.bucketCount(), 2);
  EXPECT_EQ(plan.bucket(0), (Bucket{0, 1, 1}));
  EXPECT_EQ(plan.bucket(1), (Bucket{1, 3, 9}));
}

TEST(BucketPlan, BadInputNamesValueAndRange) {
  EXPECT_THROW_MESSAGE(BucketPlan({}, 1), std::invalid_argument, "number of tensors = 0: allowed 1 or more");
  EXPECT_THROW_MESSAGE(BucketPlan({1}, 0), std::invalid_argument, "limit_bytes = 0: allowed 1 or more");
  EXPECT_THROW_MESSAGE(BucketPlan::fromEnds({1, 1}, {0, 2}), std::invalid_argument, "= 0: allowed 1..2");
  EXPECT_THROW_MESSAGE(BucketPlan::fromEnds({1, 1}, {1, 1}), std::invalid_argument, "= 1: allowed 2..2");
  EXPECT_THROW_MESSAGE(BucketPlan::fromEnds({1, 1}, {3}), std::invalid_argument, "= 3: allowed 1..2");
  EXPECT_THROW_MESSAGE(BucketPlan::fromEnds({1, 1}, {1}), std::invalid_argument, "last bucket = 1: allowed 2");
  const BucketPlan plan({1, 1}, 1);
  EXPECT_THROW_MESSAGE(static_cast<void>(plan.bucket(2)), std::out_of_range, "bucket = 2: allowed 0..1");
  EXPECT_THROW_MESSAGE(static_cast<void>(plan.bucketOf(-1)), std::out_of_range, "tensor = -1: allowed 0..1");
  EXPECT_THROW_MESSAGE(static_cast<void>(plan.offsetBytes(2)), std::out_of_range, "tensor = 2");
  EXPECT_THROW_MESSAGE(static_cast<void>(plan.tensorBytes(2)), std::out_of_range, "tensor = 2");
}

TEST(GatherSchedule, FollowsTheForwardOrder) {
  const BucketPlan plan = BucketPlan::fromEnds({1, 1, 1, 1, 1, 1, 1}, {1, 3, 5, 7});
  // Call 1 runs out of the registered order, tensor 6 is tied (calls 0 and 3), nobody reads bucket 0.
  const GatherSchedule schedule = gatherSchedule(plan, {{6, 5}, {1}, {}, {4, 6, 2}});
  EXPECT_EQ(schedule.order, (Indices{3, 1, 2, 0}));
  EXPECT_EQ(schedule.waits_for, (std::vector<Indices>{{3}, {1}, {}, {1, 2, 3}}));
  EXPECT_THROW_MESSAGE(gatherSchedule(plan, {{7}}), std::out_of_range, "tensor = 7: allowed 0..6");
}

TEST(CostModel, TheTimelineOfTwoBuckets) {
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

TEST(CostModel, BadInputNamesValueAndRange) {
  const BucketPlan plan({1, 1}, 1);
  EXPECT_THROW_MESSAGE(reduceScatterEnd(plan, {0}, {}), std::invalid_argument, "size of ready = 1: allowed 2");
  EXPECT_THROW_MESSAGE(reduceScatterEnd(plan, {1, 0.5}, {}), std::invalid_argument, "ready = 0.5: allowed finite, 1");
  EXPECT_THROW_MESSAGE(reduceScatterEnd(plan, {0, 1}, {-1, 0}), std::invalid_argument, "alpha = -1");
  EXPECT_THROW_MESSAGE(optimalFusion({1}, {0}, {0, -2}), std::invalid_argument, "beta = -2");
  EXPECT_THROW_MESSAGE(optimalFusion({}, {}, {}), std::invalid_argument, "number of tensors = 0");
  EXPECT_THROW_MESSAGE(optimalFusion({1}, {-1}, {}), std::invalid_argument, "ready = -1");
  StepModel model{{}, {}, {0, 1}, 0.5, {}, {}};
  EXPECT_THROW_MESSAGE(predictStep(plan, model), std::invalid_argument, "backward_seconds = 0.5");
  model.backward_seconds = 1;
  model.forward_seconds = {1};
  EXPECT_THROW_MESSAGE(predictStep(plan, model), std::invalid_argument, "size of forward_seconds = 1: allowed 0");
  model.forward_tensors = {{0}};
  model.forward_seconds = {-1};
  EXPECT_THROW_MESSAGE(predictStep(plan, model), std::invalid_argument, "forward_seconds = -1");
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
}  // namespace torchext::core
