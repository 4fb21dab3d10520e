#include "core/auto/bucket_program.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <tuple>

#include "tests/cpp/core/auto/layered_model.h"
#include "tests/cpp/core/base/expect_throw.h"

namespace torchext::core::testing {
namespace {

using Ends = std::vector<int>;
using Sizes = std::vector<std::size_t>;
using Times = std::vector<double>;

#ifdef TORCHEXT_SANITIZED
constexpr int kRounds = 300;
#else
constexpr int kRounds = 2000;
#endif

struct Case {
  Times ready;
  Sizes bytes;
  BucketCost cost;
};

double finishOf(const Case& given, const Ends& ends) {
  double finish = 0;
  int first = 0;
  for (const int end : ends) {
    std::size_t bytes = 0;
    double ready = 0;
    for (int i = 0; i < end; ++i) {
      ready = std::max(ready, given.ready[index(i)]);
      bytes += i >= first ? given.bytes[index(i)] : 0;
    }
    finish = std::max(finish, ready) + given.cost(bytes);
    first = end;
  }
  return finish;
}

// Every partition is a set of ends among 1..L-1: a bit each.
std::vector<Ends> allPartitions(int gradients) {
  std::vector<Ends> all;
  for (unsigned bits = 0; bits < 1U << index(gradients - 1); ++bits) {
    Ends ends;
    for (int end = 1; end <= gradients; ++end) {
      if (end == gradients || (bits >> index(end - 1) & 1U) != 0) {
        ends.push_back(end);
      }
    }
    all.push_back(ends);
  }
  return all;
}

// The fewest buckets, then the largest last one, then the largest before it.
bool preferred(const Ends& a, const Ends& b) {
  return a.size() != b.size() ? a.size() < b.size()
                              : std::lexicographical_compare(a.rbegin(), a.rend(), b.rbegin(), b.rend());
}

std::vector<Ends> optima(const Case& given) {
  double best = std::numeric_limits<double>::infinity();
  const auto all = allPartitions(static_cast<int>(given.bytes.size()));
  for (const Ends& ends : all) {
    best = std::min(best, finishOf(given, ends));
  }
  std::vector<Ends> found;
  std::copy_if(all.begin(), all.end(), std::back_inserter(found),
               [&](const Ends& ends) { return finishOf(given, ends) <= best * (1 + 1e-9); });
  return found;
}

Case straight(Times ready, Sizes bytes, double a, double b) {
  return {std::move(ready), std::move(bytes), [a, b](std::size_t size) { return a + b * static_cast<double>(size); }};
}

struct Row {
  Case given;
  double finish;
  std::size_t optimal_partitions;
  Ends one_of_them;
  double singly;
  double one_bucket;
};

TEST(BucketProgram, TheTableOfTheDesign) {
  const std::vector<Row> rows{
      {straight({1, 2, 3, 4}, {1, 1, 1, 1}, 2, 1), 9, 1, {1, 4}, 13, 10},
      {straight({1, 2, 3, 4, 5, 6}, {1, 1, 1, 1, 4, 4}, 2, 1), 18, 1, {2, 6}, 25, 20},
      {straight({3, 6, 9, 12, 15, 18}, {1, 2, 3, 4, 5, 6}, 4, 1), 37, 1, {1, 3, 6}, 48, 43},
      {straight({2, 4, 6, 8}, {4, 1, 1, 2}, 1, 1), 13, 3, {1, 4}, 14, 17},
      {straight({10, 20, 30, 40}, {2, 2, 2, 6}, 3, 2), 55, 2, {}, 55, 67},
      {straight({1, 2, 3, 4, 5}, {5, 1, 1, 1, 1}, 0, 1), 10, 8, {}, 10, 14},
  };
  for (const auto& [given, finish, optimal_partitions, one_of_them, all_alone, one_bucket] : rows) {
    const BucketProgram found = optimalBuckets(given.ready, given.bytes, given.cost);
    EXPECT_EQ(found.finish_seconds, finish);
    const std::vector<Ends> best = optima(given);
    EXPECT_EQ(best.size(), optimal_partitions);
    EXPECT_EQ(found.ends, *std::min_element(best.begin(), best.end(), preferred));
    if (!one_of_them.empty()) {
      EXPECT_NE(std::find(best.begin(), best.end(), one_of_them), best.end());
    }
    const int gradients = static_cast<int>(given.bytes.size());
    EXPECT_EQ(finishOf(given, singly(gradients)), all_alone);
    EXPECT_EQ(finishOf(given, {gradients}), one_bucket);
  }
}

Case randomCase(Random& random) {
  Case given;
  const int gradients = 1 + static_cast<int>(random.below(10));
  double now = 0;
  for (int i = 0; i < gradients; ++i) {
    now += random.uniform() * random.below(4);  // some are finished together
    given.ready.push_back(now);
    given.bytes.push_back(random.below(8));
  }
  if (random.below(2) == 0) {
    const double a = random.uniform() * 2;
    const double b = random.uniform();
    given.cost = [a, b](std::size_t bytes) { return a + b * static_cast<double>(bytes); };
  } else {
    given.cost = [table = randomTable(random, 40)](std::size_t bytes) { return table.seconds(bytes) / 4; };
  }
  return given;
}

TEST(BucketProgram, IsTheBestOfAllPartitionsAndTheFirstOfEquals) {
  Random random(11);
  int inner = 0;
  int tied = 0;
  for (int round = 0; round < kRounds; ++round) {
    const Case given = randomCase(random);
    const BucketProgram found = optimalBuckets(given.ready, given.bytes, given.cost);
    const std::vector<Ends> best = optima(given);
    ASSERT_EQ(found.ends, *std::min_element(best.begin(), best.end(), preferred)) << round;
    ASSERT_DOUBLE_EQ(found.finish_seconds, finishOf(given, found.ends)) << round;
    inner += found.ends.size() > 1 && found.ends.size() < given.bytes.size() ? 1 : 0;
    tied += best.size() > 1 ? 1 : 0;
  }
  EXPECT_GT(inner, kRounds / 3);  // the inputs are such that something is to be decided
  EXPECT_GT(tied, kRounds / 10);
}

TEST(BucketProgram, AReadyTimeBelowAnEarlierOneCountsAsThat) {
  const Case given = straight({4, 1, 2, 6}, {1, 1, 1, 1}, 0.5, 0.5);
  const Case sorted = straight({4, 4, 4, 6}, {1, 1, 1, 1}, 0.5, 0.5);
  EXPECT_EQ(optimalBuckets(given.ready, given.bytes, given.cost).ends,
            optimalBuckets(sorted.ready, sorted.bytes, sorted.cost).ends);
}

TEST(BucketProgram, ExtremesAreOneBucketAndAlmostNone) {
  Sizes bytes(30, 100);
  Times ready(30);
  std::iota(ready.begin(), ready.end(), 0.0);
  EXPECT_EQ(optimalBuckets(ready, bytes, straight({}, {}, 1000, 1e-9).cost).ends, Ends{30});
  const BucketProgram fine = optimalBuckets(ready, bytes, straight({}, {}, 0, 9e-3).cost);
  EXPECT_DOUBLE_EQ(fine.finish_seconds, 29 + 0.9);  // all but the last gradient are hidden
  EXPECT_EQ(fine.ends[fine.ends.size() - 2], 29);
}

TEST(BucketProgram, AThousandGradientsWithACostThatWantsManyBuckets) {
  const CostTable steep({{0, 0}, {1000, 1}, {2000, 50}});
  const Sizes bytes(1000, 1000);
  const Times ready(1000, 1.0);
  const BucketProgram found = optimalBuckets(ready, bytes, [&](std::size_t size) { return steep.seconds(size); });
  EXPECT_EQ(found.ends, singly(1000));
  EXPECT_NEAR(found.finish_seconds, 1001, 1e-6);
}

TEST(BucketProgram, KindsHaveAPartitionEach) {
  std::vector<Gradient> gradients;
  for (int i = 0; i < 6; ++i) {
    gradients.push_back({100, 1.0 + i, i, i % 2, -1});
  }
  const PositionsByKind by_kind = gradientsByKind(gradients);
  ASSERT_EQ(by_kind, (PositionsByKind{{0, 2, 4}, {1, 3, 5}}));
  const EndsByKind ends = optimalEnds(gradients, by_kind, straight({}, {}, 0.1, 0).cost);
  const Buckets buckets = bucketsOfEnds(by_kind, ends);
  ASSERT_EQ(ends.size(), 2U);
  EXPECT_EQ(buckets.front().back() % 2, buckets.front().front() % 2);
  for (std::size_t i = 1; i < buckets.size(); ++i) {
    EXPECT_GT(buckets[i].back(), buckets[i - 1].back());
  }
}

TEST(BucketProgram, WithoutGradientsThereIsNothingToCut) {
  EXPECT_THROW_MESSAGE(optimalBuckets({}, {}, straight({}, {}, 1, 1).cost), std::invalid_argument,
                       "number of ready times = 0");
  EXPECT_THROW_MESSAGE(optimalBuckets({1, 2}, {1}, straight({}, {}, 1, 1).cost), std::invalid_argument,
                       "number of ready times = 2");
}

TEST(GradientBuckets, OfDdpCloseWhenTheyHaveReachedTheirLimit) {
  std::vector<Gradient> gradients;
  for (const std::size_t bytes : {3U, 3U, 3U, 9U, 1U, 9U, 1U}) {
    gradients.push_back({bytes, 0, -1, 0, -1});
  }
  EXPECT_EQ(ddpBuckets(gradients, 4, 10), (Buckets{{0, 1}, {2, 3}, {4, 5}, {6}}));
  gradients[2].kind = 1;  // has limits of its own, from the first one
  EXPECT_EQ(ddpBuckets(gradients, 4, 10), (Buckets{{0, 1}, {2}, {3, 4}, {5, 6}}));
}

TEST(GradientBuckets, LayersThatGoAsRowsAreInNone) {
  const std::vector<Gradient> gradients{{1, 0, -1, 0, 0}, {1, 0, -1, 0, -1}, {1, 0, -1, 0, 1}, {1, 0, -1, 1, 0}};
  EXPECT_EQ(gradientsByKind(gradients, {0}), (PositionsByKind{{1, 2}}));
  EXPECT_EQ(gradientsByKind(gradients, {0, 1}), (PositionsByKind{{1}}));
}

}  // namespace
}  // namespace torchext::core::testing
