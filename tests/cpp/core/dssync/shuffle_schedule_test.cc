#include "core/dssync/shuffle_schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <stdexcept>

#include "core/base/check.h"
#include "shuffle_mixing.h"
#include "tests/cpp/core/base/expect_throw.h"

namespace torchext::core::testing {
namespace {

bool isPrime(int n) {
  for (int i = 2; i * i <= n; ++i) {
    if (n % i == 0) {
      return false;
    }
  }
  return n > 1;
}

// Every rank computes alone: the answers must agree, be disjoint and cover the world.
void expectPartition(const ShuffleSchedule& schedule, std::int64_t step) {
  const int world_size = schedule.options().world_size;
  std::vector<Members> groups;
  for (int rank = 0; rank < world_size; ++rank) {
    groups.push_back(schedule.groupOf(rank, step));
    ASSERT_TRUE(std::is_sorted(groups.back().begin(), groups.back().end()));
    ASSERT_TRUE(std::binary_search(groups.back().begin(), groups.back().end(), rank)) << "rank " << rank;
  }
  for (const auto& group : groups) {
    ASSERT_EQ(std::adjacent_find(group.begin(), group.end()), group.end());
    for (const int member : group) {
      ASSERT_GE(member, 0);
      ASSERT_LT(member, world_size);
      ASSERT_EQ(groups[index(member)], group) << "rank " << member << " at step " << step;
    }
  }
}

TEST(ShuffleSchedule, TheTwoRoundsOfFourByFour) {
  const ShuffleSchedule schedule(gridOptions(16, 4));
  EXPECT_EQ(schedule.period(), 2);
  EXPECT_EQ(schedule.groupOf(6, 0), (Members{4, 5, 6, 7}));
  EXPECT_EQ(schedule.groupOf(6, 1), (Members{2, 6, 10, 14}));
  EXPECT_EQ(schedule.groupOf(6, 2), schedule.groupOf(6, 0));
}

TEST(ShuffleSchedule, GridRoundsReachTheExactMean) {
  int exact = 0;
  for (int world_size = 2; world_size <= 16; ++world_size) {
    for (int group_size = 2; group_size <= world_size; ++group_size) {
      const ShuffleSchedule schedule(gridOptions(world_size, group_size));
      const GroupGrid grid(world_size, group_size);
      ASSERT_TRUE(grid.exact() || isPrime(world_size)) << world_size << " by " << group_size;
      if (!grid.exact()) {
        continue;
      }
      ++exact;
      auto narrow = randomValues<float>(world_size, 3);
      auto wide = std::vector<double>(narrow.begin(), narrow.end());
      const double mean = std::accumulate(wide.begin(), wide.end(), 0.0) / world_size;
      // From any position in the schedule.
      for (std::int64_t step = 1; step <= schedule.period(); ++step) {
        narrow = averaged(schedule, step, narrow);
        wide = averaged(schedule, step, wide);
      }
      for (int rank = 0; rank < world_size; ++rank) {
        EXPECT_NEAR(wide[index(rank)], mean, 1e-12) << world_size << " by " << group_size;
        EXPECT_NEAR(narrow[index(rank)], mean, 1e-6) << world_size << " by " << group_size;
      }
    }
  }
  EXPECT_EQ(exact, 92);  // all sizes but those of the primes 5, 7, 11 and 13 in several groups
}

TEST(ShuffleSchedule, FourByFourLeavesAFifthOfTheVarianceThenNothing) {
  const ShuffleSchedule schedule(gridOptions(16, 4));
  double after_one = 0;
  double before = 0;
  for (std::uint64_t seed = 1; seed <= 4000; ++seed) {
    auto values = randomValues<double>(16, seed);
    before += variance(values);
    values = averaged(schedule, 0, values);
    after_one += variance(values);
    EXPECT_LT(variance(averaged(schedule, 1, values)), 1e-24);
  }
  EXPECT_NEAR(after_one / before, 0.2, 0.01);  // (groups - 1) / (n - 1) = 3 / 15
}

TEST(ShuffleSchedule, RandomRoundsLeaveTheDocumentedShareOnAverage) {
  const ShuffleSchedule schedule(randomOptions(16, 4, 7));
  EXPECT_EQ(schedule.period(), 0);
  double before = 0;
  std::vector<double> after(2);
  for (std::uint64_t seed = 1; seed <= 4000; ++seed) {
    auto values = randomValues<double>(16, seed);
    before += variance(values);
    for (std::size_t round = 0; round < after.size(); ++round) {
      values = averaged(schedule, static_cast<std::int64_t>(2 * seed + round), values);
      after[round] += variance(values);
    }
  }
  EXPECT_NEAR(after[0] / before, 0.2, 0.01);
  EXPECT_NEAR(after[1] / before, 0.04, 0.004);
}

TEST(ShuffleSchedule, RandomDependsOnSeedAndStepOnly) {
  const ShuffleSchedule one(randomOptions(64, 4, 1));
  const ShuffleSchedule same(randomOptions(64, 4, 1));
  const ShuffleSchedule other(randomOptions(64, 4, 2));
  int equal_seeds = 0;
  int equal_steps = 0;
  std::set<Members> seen;
  for (std::int64_t step = 0; step < 50; ++step) {
    EXPECT_EQ(one.groupsAt(step), same.groupsAt(step));
    equal_seeds += one.groupOf(0, step) == other.groupOf(0, step) ? 1 : 0;
    equal_steps += one.groupOf(0, step) == one.groupOf(0, step + 1) ? 1 : 0;
    seen.insert(one.groupOf(0, step));
  }
  EXPECT_LT(equal_seeds, 2);
  EXPECT_LT(equal_steps, 2);
  EXPECT_GT(seen.size(), 45U);
}

TEST(ShuffleSchedule, RandomGroupsAreNearEqualAndNobodyIsAlone) {
  for (int world_size = 1; world_size <= 23; ++world_size) {
    for (int group_size = 2; group_size <= std::max(2, world_size); ++group_size) {
      const ShuffleSchedule schedule(randomOptions(world_size, group_size, 3));
      for (std::int64_t step = 0; step < 4; ++step) {
        std::size_t smallest = index(world_size);
        std::size_t largest = 0;
        const auto groups = schedule.groupsAt(step);
        for (const auto& group : groups) {
          smallest = std::min(smallest, group.size());
          largest = std::max(largest, group.size());
        }
        EXPECT_LE(largest - smallest, 1U);
        EXPECT_GE(smallest, world_size == 1 ? 1U : 2U);
        if (world_size >= 4 && group_size < world_size) {
          EXPECT_GE(groups.size(), 2U);
        }
        // As near to group_size as whole numbers of groups allow, except where somebody would be alone or everybody
        // together.
        if (groups.size() > 2 && smallest > 2) {
          EXPECT_LE(std::abs(static_cast<double>(world_size) / static_cast<double>(groups.size()) - group_size),
                    0.5 * group_size);
        }
      }
    }
  }
}

TEST(ShuffleSchedule, EveryRoundIsAPartition) {
  std::vector<ShuffleOptions> all{fourRacks(), gridOptions(1, 2), randomOptions(1, 2, 1)};
  for (const int world_size : {2, 3, 5, 6, 7, 12, 13, 16, 30, 37}) {
    for (const int group_size : {2, 3, 4, 8}) {
      const int size = std::min(group_size, std::max(2, world_size));
      all.push_back(gridOptions(world_size, size));
      all.push_back(randomOptions(world_size, size, 9));
      ShuffleOptions racks{.world_size = world_size, .group_size = size, .kind = ShuffleKind::kTopology};
      for (int rank = 0; rank < world_size; ++rank) {
        racks.host_of.push_back(rank % std::max(1, world_size / 3));  // scattered ranks, hosts of several sizes
      }
      all.push_back(racks);
      for (int host = 0; host < std::max(1, world_size / 3); ++host) {
        racks.rack_of.push_back(host * host % 5 == 4 ? 1 % std::max(1, world_size / 3 - 1) : 0);
      }
      if (*std::max_element(racks.rack_of.begin(), racks.rack_of.end()) == 1) {
        all.push_back(racks);
      }
    }
  }
  for (const auto& options : all) {
    const ShuffleSchedule schedule(options);
    const std::int64_t period = std::max<std::int64_t>(schedule.period(), 6);
    for (std::int64_t step = 0; step < period; ++step) {
      expectPartition(schedule, step);
      if (schedule.period() > 0) {
        EXPECT_EQ(schedule.groupsAt(step), schedule.groupsAt(step + schedule.period()));
      }
    }
  }
}

TEST(ShuffleSchedule, WorksAtAThousandRanks) {
  std::vector<ShuffleOptions> all{gridOptions(1024, 4), randomOptions(1024, 4, 1), gridOptions(1021, 4),
                                  ShuffleOptions{.world_size = 1024,
                                                 .group_size = 8,
                                                 .kind = ShuffleKind::kTopology,
                                                 .host_of = blocks(128, 8),
                                                 .rack_of = blocks(8, 16)}};
  for (const auto& options : all) {
    const ShuffleSchedule schedule(options);
    const std::int64_t period = schedule.period() > 0 ? schedule.period() : 2;
    EXPECT_LE(period, 16);
    for (std::int64_t step = 0; step < period; ++step) {
      expectPartition(schedule, step);
    }
    auto values = randomValues<double>(options.world_size, 8);
    const double before = variance(values);
    for (std::int64_t step = 0; step < 5; ++step) {
      values = averaged(schedule, step, values);
    }
    EXPECT_LT(variance(values) / before, 0.02) << toString(options.kind);
  }
}

TEST(ShuffleSchedule, NamesRoundTrip) {
  for (const auto kind : {ShuffleKind::kGrid, ShuffleKind::kRandom, ShuffleKind::kTopology}) {
    EXPECT_EQ(parseShuffleKind(toString(kind)), kind);
  }
  EXPECT_THROW_MESSAGE(parseShuffleKind("gird"), std::invalid_argument, "\"gird\": allowed grid, random, topology");
}

TEST(ShuffleSchedule, BadInputNamesValueAndRange) {
  const auto make = [](const ShuffleOptions& options) { return ShuffleSchedule(options); };
  EXPECT_THROW_MESSAGE(make({.world_size = 0}), std::invalid_argument, "world_size = 0: allowed 1 or more");
  EXPECT_THROW_MESSAGE(make(gridOptions(4, 1)), std::invalid_argument,
                       "group_size = 1: allowed 2..max(2, world_size) = 2..4");
  EXPECT_THROW_MESSAGE(make(gridOptions(4, 5)), std::invalid_argument, "group_size = 5");
  ShuffleOptions options = fourRacks();
  options.host_of.clear();
  EXPECT_THROW_MESSAGE(make(options), std::invalid_argument, "size of host_of = 0: allowed world_size = 16");
  options = fourRacks();
  options.rack_of.pop_back();
  EXPECT_THROW_MESSAGE(make(options), std::invalid_argument, "size of rack_of = 7: allowed 0 or the number of hosts");
  options.rack_of.push_back(8);
  EXPECT_THROW_MESSAGE(make(options), std::invalid_argument, "rack_of = 8: allowed rack indices 0..7");
  options.rack_of.back() = 5;
  EXPECT_THROW_MESSAGE(make(options), std::invalid_argument, "no host is in rack 4");
  options = fourRacks();
  options.uplink_bandwidth = {1, 1};
  EXPECT_THROW_MESSAGE(make(options), std::invalid_argument,
                       "size of uplink_bandwidth = 2: allowed 0 or the number of racks = 4");
  options.uplink_bandwidth = {1, 1, 0, 1};
  EXPECT_THROW_MESSAGE(make(options), std::invalid_argument, "uplink_bandwidth[2] = 0: allowed more than 0");
  const ShuffleSchedule schedule(gridOptions(4, 2));
  EXPECT_THROW_MESSAGE(schedule.groupOf(4, 0), std::out_of_range, "rank = 4: allowed 0..3");
  EXPECT_THROW_MESSAGE(schedule.groupOf(0, -1), std::invalid_argument, "step = -1: allowed 0 or more");
  EXPECT_THROW_MESSAGE(schedule.traffic(0, -1.0), std::invalid_argument, "payload = -1");
}

}  // namespace
}  // namespace torchext::core::testing
