// Schedules that know racks, and the bytes that all schedules put on the links.
#include <gtest/gtest.h>

#include <numeric>
#include <utility>

#include "shuffle_mixing.h"

namespace torchext::core::testing {
namespace {

TEST(ShuffleTopology, TopologyRoundsInsideRacksLeaveTheUplinksAlone) {
  const ShuffleSchedule schedule(fourRacks());
  EXPECT_EQ(schedule.inRackRounds(), 2);
  EXPECT_EQ(schedule.period(), 3);
  int crossing = 0;
  for (std::int64_t step = 0; step < 30; ++step) {
    const auto traffic = schedule.traffic(step, 1000.0);
    if (schedule.crosses(step)) {
      ++crossing;
      for (const double bytes : traffic.uplink) {
        EXPECT_NEAR(bytes, 2.0 * 15 / 16 * 1000.0, 1e-9);  // the one ring passes each uplink once
      }
    } else {
      EXPECT_EQ(traffic.uplink, std::vector<double>(4, 0.0));
      EXPECT_EQ(traffic.rank, std::vector<double>(16, 1500.0));
    }
  }
  EXPECT_EQ(crossing, 10);
  EXPECT_EQ(schedule.groupOf(5, 0), (Members{4, 5, 6, 7}));
  EXPECT_EQ(schedule.groupOf(5, 2).size(), 16U);
}

TEST(ShuffleTopology, AGroupSizedHostKeepsItsFirstRoundToItself) {
  ShuffleOptions options{.world_size = 32,
                         .group_size = 4,
                         .kind = ShuffleKind::kTopology,
                         .host_of = blocks(8, 4),
                         .rack_of = blocks(2, 4)};
  const ShuffleSchedule schedule(options);
  EXPECT_EQ(schedule.traffic(0, 8.0).host, std::vector<double>(8, 0.0));
  EXPECT_EQ(schedule.groupOf(0, 1), (Members{0, 4, 8, 12}));
  EXPECT_EQ(schedule.traffic(1, 8.0).host, std::vector<double>(8, 4 * 12.0));
  EXPECT_EQ(schedule.traffic(1, 8.0).uplink, std::vector<double>(2, 0.0));
}

TEST(ShuffleTopology, TopologyCrossRoundsReachTheExactMean) {
  // 6 racks of 4 ranks, groups of 2 or 3 racks: two coordinates.
  ShuffleOptions options{.world_size = 24, .group_size = 2, .kind = ShuffleKind::kTopology, .host_of = blocks(6, 4)};
  const ShuffleSchedule schedule(options);
  auto values = randomValues<double>(24, 11);
  const double mean = std::accumulate(values.begin(), values.end(), 0.0) / 24;
  for (std::int64_t step = 0; step < 6; ++step) {
    EXPECT_GT(variance(values), 1e-6);
    values = averaged(schedule, step, values);
  }
  for (const double value : values) {
    EXPECT_NEAR(value, mean, 1e-12);
  }
}

TEST(ShuffleTopology, UnequalRacksConverge) {
  ShuffleOptions options{
      .world_size = 11, .group_size = 2, .kind = ShuffleKind::kTopology, .host_of = {0, 0, 0, 0, 0, 1, 2, 2, 3, 4, 4}};
  const ShuffleSchedule schedule(options);
  EXPECT_EQ(schedule.groupOf(5, 0), (Members{5}));  // alone in its rack
  auto values = randomValues<double>(11, 2);
  const double before = variance(values);
  for (std::int64_t step = 0; step < 60; ++step) {
    values = averaged(schedule, step, values);
  }
  EXPECT_LT(variance(values) / before, 1e-6);
}

TEST(ShuffleTopology, SlowUplinksAreCrossedLessOften) {
  ShuffleOptions options = fourRacks();
  const auto rounds = [&options](double host, std::vector<double> uplink) {
    options.host_bandwidth = host;
    options.uplink_bandwidth = std::move(uplink);
    return ShuffleSchedule(options).inRackRounds();
  };
  EXPECT_EQ(rounds(10, {10, 10, 10, 10}), 2);
  EXPECT_EQ(rounds(10, {10, 2, 10, 10}), 5);
  EXPECT_EQ(rounds(10, {10, 3, 10, 10}), 4);
  EXPECT_EQ(rounds(10, {10, 0.01, 10, 10}), kMostInRackRounds);
  EXPECT_EQ(rounds(1, {10, 10, 10, 10}), 2);
  options.rack_of.assign(8, 0);
  EXPECT_EQ(rounds(10, {1}), 0);
  EXPECT_FALSE(ShuffleSchedule(options).crosses(2));
  EXPECT_EQ(ShuffleSchedule(options).period(), 2);
}

TEST(ShuffleTopology, GridTrafficIsThatOfTheRings) {
  ShuffleOptions options = gridOptions(16, 4);
  options.host_of = blocks(8, 2);
  options.rack_of = blocks(4, 2);
  const ShuffleSchedule schedule(options);
  const auto inside = schedule.traffic(0, 100.0);
  EXPECT_EQ(inside.rank, std::vector<double>(16, 150.0));
  EXPECT_EQ(inside.host, std::vector<double>(8, 150.0));
  EXPECT_EQ(inside.uplink, std::vector<double>(4, 0.0));
  const auto across = schedule.traffic(1, 100.0);
  EXPECT_EQ(across.rank, std::vector<double>(16, 150.0));
  EXPECT_EQ(across.host, std::vector<double>(8, 300.0));
  EXPECT_EQ(across.uplink, std::vector<double>(4, 600.0));  // one from each rack in a group: a ring for each rank
  const ShuffleSchedule everybody(gridOptions(16, 16));
  EXPECT_EQ(everybody.traffic(0, 100.0).rank, std::vector<double>(16, 187.5));  // all-reduce
}

}  // namespace
}  // namespace torchext::core::testing
