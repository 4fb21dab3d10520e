#include "core/dssync/group_grid.h"

#include <gtest/gtest.h>

#include <stdexcept>

#include "shuffle_mixing.h"
#include "tests/cpp/core/base/expect_throw.h"

namespace torchext::core::testing {
namespace {

TEST(GroupGrid, MixedSidesAreClosestToTheGroupSize) {
  EXPECT_EQ(GroupGrid(12, 4).radices(), (std::vector<int>{4, 3}));
  EXPECT_EQ(GroupGrid(12, 2).radices(), (std::vector<int>{3, 2, 2}));
  EXPECT_EQ(GroupGrid(1024, 4).radices(), (std::vector<int>{4, 4, 4, 4, 4}));
  EXPECT_EQ(GroupGrid(1024, 32).radices(), (std::vector<int>{32, 32}));
  EXPECT_EQ(GroupGrid(14, 4).radices(), (std::vector<int>{7, 2}));
  EXPECT_EQ(GroupGrid(6, 5).radices(), (std::vector<int>{3, 2}));  // not everybody together
  EXPECT_EQ(GroupGrid(7, 7).radices(), (std::vector<int>{7}));
  EXPECT_EQ(GroupGrid(7, 9).radices(), (std::vector<int>{7}));
  EXPECT_FALSE(GroupGrid(7, 6).exact());
  EXPECT_FALSE(GroupGrid(2 * 73, 4).exact());  // 73 together would be no group of about 4
  const ShuffleSchedule schedule(gridOptions(12, 4));
  EXPECT_EQ(schedule.groupOf(5, 0), (Members{4, 5, 6, 7}));
  EXPECT_EQ(schedule.groupOf(5, 1), (Members{1, 5, 9}));
}

TEST(GroupGrid, PrimesContractAsDocumented) {
  for (const int world_size : {5, 7, 11, 13, 17, 19, 23, 31, 61, 97, 127, 211, 2 * 73}) {
    for (const int group_size : {2, 3, 4, 8}) {
      const GroupGrid grid(world_size, group_size);
      if (grid.exact()) {
        continue;
      }
      const ShuffleSchedule schedule(gridOptions(world_size, group_size));
      const double worst = worstContraction(schedule, schedule.period());
      EXPECT_LE(worst, 0.25) << world_size << " by " << group_size;
      EXPECT_GT(worst, 0) << world_size << " by " << group_size;
      double before = 0;
      double after = 0;
      for (std::uint64_t seed = 1; seed <= 300; ++seed) {
        auto values = randomValues<double>(world_size, seed);
        before += variance(values);
        for (std::int64_t step = 0; step < schedule.period(); ++step) {
          values = averaged(schedule, step, values);
        }
        after += variance(values);
      }
      EXPECT_LE(after / before, 0.035) << world_size << " by " << group_size;
    }
  }
}

TEST(GroupGrid, DealtGroupsAreNearEqual) {
  const ShuffleSchedule schedule(gridOptions(11, 4));
  EXPECT_EQ(schedule.period(), 2);
  EXPECT_EQ(schedule.groupsAt(0), (std::vector<Members>{{0, 1, 2}, {3, 4, 5, 6}, {7, 8, 9, 10}}));
  EXPECT_EQ(schedule.groupsAt(1), (std::vector<Members>{{0, 4, 8}, {1, 2, 5, 9}, {3, 6, 7, 10}}));
}

TEST(GroupGrid, BadInputNamesValueAndRange) {
  EXPECT_THROW_MESSAGE(GroupGrid(0, 2), std::invalid_argument, "size of the grid = 0: allowed 1 or more");
  EXPECT_THROW_MESSAGE(GroupGrid(4, 1), std::invalid_argument, "group_size = 1: allowed 2 or more");
  EXPECT_THROW_MESSAGE(GroupGrid(4, 2).groupOf(4, 0), std::out_of_range, "position = 4: allowed 0..3");
  EXPECT_THROW_MESSAGE(GroupGrid(4, 2).groupOf(0, -1), std::invalid_argument, "round = -1: allowed 0 or more");
}

TEST(GroupGrid, PartsCoverTheListAndKnowTheirPositions) {
  for (const int size : {1, 5, 16, 211}) {
    for (int parts = 1; parts <= size; ++parts) {
      ASSERT_EQ(partBegin(size, parts, 0), 0);
      ASSERT_EQ(partBegin(size, parts, parts), size);
      for (int position = 0; position < size; ++position) {
        const int part = partOf(size, parts, position);
        ASSERT_LE(partBegin(size, parts, part), position);
        ASSERT_GT(partBegin(size, parts, part + 1), position);
      }
    }
  }
}

}  // namespace
}  // namespace torchext::core::testing
