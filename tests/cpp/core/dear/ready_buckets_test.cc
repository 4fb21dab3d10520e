#include "core/dear/ready_buckets.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <vector>

#include <gtest/gtest.h>

#include "core/base/check.h"
#include "core/base/random.h"

namespace torchext::core {
namespace {

std::vector<std::size_t> takeAll(ReadyBuckets& ready) {
  std::vector<std::size_t> taken;
  while (const std::optional<std::size_t> bucket = ready.take()) {
    taken.push_back(*bucket);
  }
  return taken;
}

using Buckets = std::vector<std::size_t>;

TEST(ReadyBuckets, NothingBeforeTheFirstPass) {
  ReadyBuckets none;
  EXPECT_EQ(none.size(), 0U);
  EXPECT_EQ(none.take(), std::nullopt);
  ReadyBuckets ready({{1, 0}, {2}}, 3);
  EXPECT_EQ(ready.take(), std::nullopt);
}

TEST(ReadyBuckets, ABucketWaitsForThoseBeforeIt) {
  ReadyBuckets ready({{3, 2}, {1}, {0}}, 4);
  ready.begin();
  EXPECT_TRUE(ready.arrive(1));
  EXPECT_TRUE(ready.arrive(2));
  EXPECT_EQ(takeAll(ready), Buckets{});
  EXPECT_TRUE(ready.arrive(3));
  EXPECT_EQ(takeAll(ready), (Buckets{0, 1}));
  EXPECT_EQ(takeAll(ready), Buckets{});
  EXPECT_TRUE(ready.arrive(0));
  EXPECT_EQ(takeAll(ready), Buckets{2});
}

TEST(ReadyBuckets, AGradientThatComesAgainIsInTimeUntilItsBucketIsTaken) {
  ReadyBuckets ready({{0, 1}}, 2);
  ready.begin();
  EXPECT_TRUE(ready.arrive(0));
  EXPECT_TRUE(ready.arrive(0));
  EXPECT_EQ(takeAll(ready), Buckets{});
  EXPECT_TRUE(ready.arrive(1));
  EXPECT_TRUE(ready.arrive(1));
  EXPECT_EQ(takeAll(ready), Buckets{0});
  EXPECT_FALSE(ready.arrive(0));
}

TEST(ReadyBuckets, TheEndCompletesWhatIsMissing) {
  ReadyBuckets ready({{4}, {3, 2}, {1}}, 5);  // 0 is in no bucket
  ready.begin();
  EXPECT_TRUE(ready.arrive(4));
  EXPECT_TRUE(ready.arrive(2));
  EXPECT_TRUE(ready.arrive(0));
  EXPECT_EQ(takeAll(ready), Buckets{0});
  EXPECT_EQ(ready.missing(), (std::vector<std::int64_t>{3, 1}));
  ready.end();
  EXPECT_FALSE(ready.hasArrived(3));
  EXPECT_TRUE(ready.hasArrived(2));
  EXPECT_EQ(takeAll(ready), (Buckets{1, 2}));
  ready.begin();
  EXPECT_FALSE(ready.hasArrived(2));
  EXPECT_EQ(takeAll(ready), Buckets{});
}

TEST(ReadyBuckets, ATensorIsInOneBucket) {
  EXPECT_THROW(ReadyBuckets({{0}, {0}}, 1), std::invalid_argument);
  EXPECT_THROW(ReadyBuckets({{1}}, 1), std::invalid_argument);
  EXPECT_THROW(ReadyBuckets({{-1}}, 1), std::invalid_argument);
}

// Whatever order gradients come in, and whichever are unused, all ranks take all buckets in one order; a bucket is
// taken as early as that order allows.
TEST(ReadyBuckets, EveryPassTakesAllInOrder) {
  Random random(11);
  for (int round = 0; round < 500; ++round) {
    const std::uint32_t tensors = 1 + random.below(12);
    const std::uint32_t count = 1 + random.below(4);
    std::vector<std::vector<std::int64_t>> buckets(count);
    for (std::uint32_t tensor = 0; tensor < tensors; ++tensor) {
      buckets[random.below(count)].push_back(tensor);
    }
    std::erase_if(buckets, [](const auto& bucket) { return bucket.empty(); });
    ReadyBuckets ready(buckets, tensors);
    for (int pass = 0; pass < 3; ++pass) {
      std::vector<std::size_t> order(tensors);
      std::iota(order.begin(), order.end(), 0U);
      random.shuffle(order);
      order.resize(random.below(tensors + 1));
      ready.begin();
      Buckets taken;
      for (const std::size_t tensor : order) {
        EXPECT_TRUE(ready.arrive(tensor));
        for (const std::size_t bucket : takeAll(ready)) {
          taken.push_back(bucket);
        }
        const auto complete = [&](const auto& bucket) {
          return std::all_of(bucket.begin(), bucket.end(), [&](auto t) { return ready.hasArrived(index(t)); });
        };
        const auto first = std::find_if_not(buckets.begin(), buckets.end(), complete);
        EXPECT_EQ(taken.size(), static_cast<std::size_t>(first - buckets.begin()));
      }
      ready.end();
      for (const std::size_t bucket : takeAll(ready)) {
        taken.push_back(bucket);
      }
      Buckets all(buckets.size());
      std::iota(all.begin(), all.end(), 0U);
      EXPECT_EQ(taken, all);
    }
  }
}

}  // namespace
}  // namespace torchext::core
