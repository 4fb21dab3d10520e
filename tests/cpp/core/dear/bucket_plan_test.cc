#include "core/dear/bucket_plan.h"

#include <gtest/gtest.h>

#include <limits>
#include <stdexcept>
#include <vector>

#include "core/base/check.h"
#include "core/base/random.h"
#include "tests/cpp/core/base/expect_throw.h"

namespace torchext::core {
namespace {

using Sizes = std::vector<std::size_t>;

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
  EXPECT_EQ(plan.totalBytes(), 52U);
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
}

}  // namespace
}  // namespace torchext::core
