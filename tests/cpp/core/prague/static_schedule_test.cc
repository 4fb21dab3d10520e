#include "core/prague/static_schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>

#include "core/base/check.h"
#include "tests/cpp/core/base/expect_throw.h"

namespace torchext::core {
namespace {

std::vector<int> hosts(int count, int size) {
  std::vector<int> host_of;
  for (int rank = 0; rank < count * size; ++rank) {
    host_of.push_back(rank / size);
  }
  return host_of;
}

std::vector<double> average(const std::vector<double>& values, std::int64_t step, const std::vector<int>& host_of) {
  std::vector<double> result;
  const int world_size = static_cast<int>(values.size());
  for (int rank = 0; rank < world_size; ++rank) {
    double sum = 0;
    const auto members = staticGroup(rank, step, world_size, host_of);
    for (const int member : members) {
      sum += values[index(member)];
    }
    result.push_back(sum / static_cast<double>(members.size()));
  }
  return result;
}

double variance(const std::vector<double>& values) {
  const double mean = std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
  double sum = 0;
  for (const double value : values) {
    sum += (value - mean) * (value - mean);
  }
  return sum;
}

TEST(StaticSchedule, TheFourStepsOfFourHostsOfFour) {
  const auto host_of = hosts(4, 4);
  using Members = std::vector<int>;
  EXPECT_EQ(staticGroup(4, 0, 16, host_of), (Members{0, 4, 8, 12}));
  EXPECT_EQ(staticGroup(5, 0, 16, host_of), (Members{5}));
  EXPECT_EQ(staticGroup(6, 0, 16, host_of), (Members{6, 7}));
  EXPECT_EQ(staticGroup(7, 0, 16, host_of), (Members{6, 7}));
  EXPECT_EQ(staticGroup(6, 1, 16, host_of), (Members{4, 5, 6, 7}));
  EXPECT_EQ(staticGroup(4, 2, 16, host_of), (Members{4, 7}));
  EXPECT_EQ(staticGroup(7, 2, 16, host_of), (Members{4, 7}));
  EXPECT_EQ(staticGroup(13, 2, 16, host_of), (Members{1, 5, 9, 13}));
  EXPECT_EQ(staticGroup(6, 2, 16, host_of), (Members{6}));
  EXPECT_EQ(staticGroup(0, 3, 16, host_of), (Members{0, 1, 2, 3}));
}

TEST(StaticSchedule, EveryPairOfStepsMultipliesTheVarianceAcrossHostsBy05625) {
  const auto host_of = hosts(4, 4);
  // After a whole-host step all values of a host are equal: the state in which each (inter, intra) pair finds them.
  std::vector<double> values{1, 1, 1, 1, -2, -2, -2, -2, 5, 5, 5, 5, 0.5, 0.5, 0.5, 0.5};
  double before = variance(values);
  for (std::int64_t step = 0; step < 12; step += 2) {
    values = average(average(values, step, host_of), step + 1, host_of);
    const double after = variance(values);
    EXPECT_NEAR(after / before, 0.5625, 1e-12) << "steps " << step << ", " << step + 1;
    before = after;
  }
}

TEST(StaticSchedule, OneHostPairsNeighboursAndMixes) {
  using Members = std::vector<int>;
  EXPECT_EQ(staticGroup(1, 0, 4, {}), (Members{0, 1}));
  EXPECT_EQ(staticGroup(1, 2, 4, {}), (Members{1, 2}));
  EXPECT_EQ(staticGroup(0, 2, 4, {}), (Members{0, 3}));
  EXPECT_EQ(staticGroup(2, 1, 4, {}), (Members{0, 1, 2, 3}));
  EXPECT_EQ(staticGroup(4, 0, 5, {}), (Members{2, 3, 4}));
  EXPECT_EQ(staticGroup(0, 2, 5, {}), (Members{0, 3, 4}));
  EXPECT_EQ(staticGroup(0, 0, 1, {}), (Members{0}));
}

// Every rank computes alone: the answers must agree, be disjoint and cover the world.
TEST(StaticSchedule, GroupsPartitionTheWorld) {
  const std::vector<std::vector<int>> worlds{
      hosts(1, 7), hosts(3, 1), hosts(2, 2),           hosts(3, 3),
      hosts(4, 5), hosts(2, 8), {0, 0, 0, 1, 2, 2, 1}, {1, 0, 1, 0, 1, 2},
  };
  for (const auto& host_of : worlds) {
    const int world_size = static_cast<int>(host_of.size());
    for (std::int64_t step = 0; step < 2 * kStaticPeriod; ++step) {
      for (int rank = 0; rank < world_size; ++rank) {
        const auto members = staticGroup(rank, step, world_size, host_of);
        EXPECT_TRUE(std::is_sorted(members.begin(), members.end()));
        EXPECT_NE(std::find(members.begin(), members.end(), rank), members.end());
        EXPECT_EQ(members, staticGroup(rank, step + kStaticPeriod, world_size, host_of));
        for (const int member : members) {
          EXPECT_EQ(members, staticGroup(member, step, world_size, host_of));
        }
      }
    }
  }
}

TEST(StaticSchedule, ThousandRanksOnHostsOfEightReachConsensus) {
  constexpr int kRanks = 1024;
  const auto host_of = hosts(kRanks / 8, 8);
  std::vector<double> values;
  for (int rank = 0; rank < kRanks; ++rank) {
    values.push_back(rank % 37);
  }
  values = average(values, 1, host_of);
  const double before = variance(values);
  for (std::int64_t step = 2; step < 6; ++step) {
    values = average(values, step, host_of);
  }
  // A pair of steps takes 1/8 of the deviation of each host away: (7/8)^2 of the variance remains.
  EXPECT_NEAR(variance(values) / before, std::pow(0.875, 4), 1e-9);
}

TEST(StaticSchedule, BadInputNamesValueAndRange) {
  EXPECT_THROW_MESSAGE(staticGroup(4, 0, 4, {}), std::out_of_range, "rank = 4: allowed 0..3");
  EXPECT_THROW_MESSAGE(staticGroup(0, -1, 4, {}), std::invalid_argument, "step = -1: allowed 0 or more");
  EXPECT_THROW_MESSAGE(staticGroup(0, 0, 0, {}), std::invalid_argument, "world_size = 0");
  EXPECT_THROW_MESSAGE(staticGroup(0, 0, 4, {0, 1}), std::invalid_argument, "size of host_of = 2");
}

}  // namespace
}  // namespace torchext::core
