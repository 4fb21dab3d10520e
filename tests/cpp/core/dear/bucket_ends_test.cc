#include "core/dear/bucket_ends.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <vector>

#include "core/base/random.h"

namespace torchext::core {
namespace {

using Ends = std::vector<int>;
using Order = std::vector<std::int64_t>;

TEST(BucketEnds, AreThoseOfTheOneKind) {
  const std::map<int, Ends> expected{{0, {1, 3, 6}}};
  EXPECT_EQ(endsByKind({0, 0, 0, 0, 0, 0}, {1, 3, 6}), expected);
}

TEST(BucketEnds, ABucketHasTheKindOfItsLastGradient) {
  // Places 0, 2, 3 and 5 are of one kind, 1 and 4 of another, whose bucket is complete at place 4.
  EXPECT_EQ(endsByKind({3, 7, 3, 3, 7, 3}, {3, 5, 6}), (std::map<int, Ends>{{3, {2, 4}}, {7, {2}}}));
  EXPECT_EQ(endsByKind({7, 7, 3}, {2, 3}), (std::map<int, Ends>{{3, {1}}, {7, {2}}}));
}

TEST(BucketEnds, RefusesWhatIsNoPartition) {
  const std::vector<int> kinds{0, 0, 0};
  for (const Ends& ends : {Ends{}, Ends{2}, Ends{0, 3}, Ends{2, 2, 3}, Ends{3, 2}, Ends{4}, Ends{-1, 3}}) {
    EXPECT_THROW(endsByKind(kinds, ends), std::invalid_argument);
  }
  EXPECT_THROW(endsByKind({0, 1}, {2}), std::invalid_argument);        // kind 0 has no bucket
  EXPECT_THROW(endsByKind({0, 0, 1}, {1, 3}), std::invalid_argument);  // its second gradient has none
  EXPECT_TRUE(endsByKind({}, {}).empty());
}

TEST(KeepsBuckets, OrderWithinABucketIsFree) {
  const Order planned{5, 4, 3, 2, 1, 0};
  const Ends ends{2, 5, 6};
  EXPECT_TRUE(keepsBuckets(planned, ends, planned));
  EXPECT_TRUE(keepsBuckets(planned, ends, {4, 5, 1, 2, 3, 0}));
  EXPECT_FALSE(keepsBuckets(planned, ends, {5, 3, 4, 2, 1, 0}));
  EXPECT_FALSE(keepsBuckets(planned, ends, {0, 1, 2, 3, 4, 5}));
}

TEST(KeepsBuckets, WhatHasNotComeSaysNothing) {
  const Order planned{5, 4, 3, 2, 1, 0};
  const Ends ends{2, 5, 6};
  EXPECT_TRUE(keepsBuckets(planned, ends, {}));
  EXPECT_TRUE(keepsBuckets(planned, ends, {5, 1, 0}));
  EXPECT_FALSE(keepsBuckets(planned, ends, {0, 5}));
}

TEST(KeepsBuckets, AgreesWithTheLastGradientOfEachBucket) {
  Random random(1);
  for (int round = 0; round < 300; ++round) {
    const std::uint32_t count = 2 + random.below(8);
    Order planned;
    Ends ends;
    for (std::uint32_t i = 0; i < count; ++i) {
      planned.push_back(i);
      if (i == count - 1 || random.below(2) == 0) {
        ends.push_back(static_cast<int>(i + 1));
      }
    }
    Order observed = planned;
    std::swap(observed[random.below(count)], observed[random.below(count)]);
    // Of one kind: the buckets cut from the observed order at the same ends hold the same gradients.
    bool same = true;
    int begin = 0;
    for (const int end : ends) {
      same = same && std::is_permutation(planned.begin() + begin, planned.begin() + end, observed.begin() + begin);
      begin = end;
    }
    EXPECT_EQ(keepsBuckets(planned, ends, observed), same);
  }
}

}  // namespace
}  // namespace torchext::core
