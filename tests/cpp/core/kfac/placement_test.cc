#include "core/kfac/placement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "core/base/check.h"
#include "core/base/random.h"
#include "tests/cpp/core/base/expect_throw.h"

namespace torchext::core {
namespace {

using Costs = std::vector<double>;

Costs randomCosts(Random& random, std::size_t count) {
  Costs costs(count);
  for (double& cost : costs) {
    cost = static_cast<double>(random.below(1000));
  }
  return costs;
}

// The smallest largest sum over all ways to cut the list.
double bruteForceSplit(const Costs& costs, std::size_t from, int ranks) {
  if (ranks == 1) {
    return std::accumulate(costs.begin() + static_cast<std::ptrdiff_t>(from), costs.end(), 0.0);
  }
  double best = std::numeric_limits<double>::infinity();
  double sum = 0;
  for (std::size_t end = from; end <= costs.size(); ++end) {
    best = std::min(best, std::max(sum, bruteForceSplit(costs, end, ranks - 1)));
    sum += end < costs.size() ? costs[end] : 0;
  }
  return best;
}

// The smallest largest sum over all assignments.
double bruteForceBalance(const Costs& costs, std::size_t task, Costs& load) {
  if (task == costs.size()) {
    return *std::max_element(load.begin(), load.end());
  }
  double best = std::numeric_limits<double>::infinity();
  for (double& sum : load) {
    sum += costs[task];
    best = std::min(best, bruteForceBalance(costs, task + 1, load));
    sum -= costs[task];
  }
  return best;
}

TEST(Placement, SplitInOrderIsOptimal) {
  Random random(3);
  for (int round = 0; round < 300; ++round) {
    const Costs costs = randomCosts(random, random.below(10));
    const int ranks = 1 + static_cast<int>(random.below(5));
    const auto rank_of = splitInOrder(costs, ranks);
    EXPECT_TRUE(std::is_sorted(rank_of.begin(), rank_of.end()));
    ASSERT_EQ(largestLoad(costs, rank_of, ranks), bruteForceSplit(costs, 0, ranks));
  }
}

TEST(Placement, BalanceIsWithinGrahamsBound) {
  Random random(4);
  for (int round = 0; round < 150; ++round) {
    const Costs costs = randomCosts(random, 1 + random.below(7));
    const int ranks = 1 + static_cast<int>(random.below(4));
    Costs load(index(ranks), 0);
    const double best = bruteForceBalance(costs, 0, load);
    const double reached = largestLoad(costs, balanceLoad(costs, ranks), ranks);
    ASSERT_GE(reached, best);
    ASSERT_LE(reached, (4.0 / 3 - 1.0 / (3 * ranks)) * best + 1e-9);
  }
}

TEST(Placement, BalanceAgainstTheLowerBoundAtScale) {
  Random random(5);
  const Costs costs = randomCosts(random, 5000);
  const int ranks = 1024;
  const double mean = std::accumulate(costs.begin(), costs.end(), 0.0) / ranks;
  const double bound = std::max(mean, *std::max_element(costs.begin(), costs.end()));
  EXPECT_LE(largestLoad(costs, balanceLoad(costs, ranks), ranks), 4.0 / 3 * bound);
}

TEST(Placement, RoundsAreBlocksInOrderForTheLeastLoaded) {
  Random random(6);
  for (int round = 0; round < 200; ++round) {
    const Costs costs = randomCosts(random, random.below(30));
    const int ranks = 1 + static_cast<int>(random.below(5));
    const int rounds = 1 + static_cast<int>(random.below(4));
    const auto rank_of = splitInRounds(costs, ranks, rounds);
    ASSERT_EQ(rank_of.size(), costs.size());
    int blocks = 0;
    for (std::size_t i = 0; i < rank_of.size(); ++i) {
      blocks += i == 0 || rank_of[i] != rank_of[i - 1] ? 1 : 0;
    }
    ASSERT_LE(blocks, ranks * rounds);
    if (rounds == 1) {
      ASSERT_EQ(largestLoad(costs, rank_of, ranks), largestLoad(costs, splitInOrder(costs, ranks), ranks));
    }
  }
}

TEST(Placement, ExactValues) {
  EXPECT_EQ(splitInRounds({1, 1, 1, 1, 1, 1, 1, 1}, 4, 2), (std::vector<int>{0, 1, 2, 3, 0, 1, 2, 3}));
  EXPECT_EQ(splitInRounds({4, 2, 3, 3, 1, 5}, 2, 3), (std::vector<int>{0, 1, 1, 0, 0, 1}));
  EXPECT_EQ(splitInRounds({}, 3, 2), std::vector<int>{});

  EXPECT_EQ(balanceLoad({3, 3, 2, 2, 2}, 2), (std::vector<int>{0, 1, 0, 1, 0}));
  EXPECT_EQ(splitInOrder({1, 2, 3, 4, 5}, 2), (std::vector<int>{0, 0, 0, 1, 1}));
  EXPECT_EQ(splitInOrder({}, 3), std::vector<int>{});
  EXPECT_EQ(balanceLoad({}, 3), std::vector<int>{});
}

TEST(Placement, BadArguments) {
  EXPECT_THROW_MESSAGE(balanceLoad({1}, 0), std::invalid_argument, "ranks = 0");
  EXPECT_THROW_MESSAGE(splitInOrder({1, -1}, 2), std::invalid_argument, "cost = -1");
  EXPECT_THROW_MESSAGE(splitInRounds({1}, 2, 0), std::invalid_argument, "rounds = 0");
  EXPECT_THROW(splitInOrder({std::numeric_limits<double>::quiet_NaN()}, 2), std::invalid_argument);
  EXPECT_THROW(largestLoad({1}, {2}, 2), std::out_of_range);
}

}  // namespace
}  // namespace torchext::core
