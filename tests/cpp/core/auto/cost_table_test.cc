#include "core/auto/cost_table.h"

#include <gtest/gtest.h>

#include <limits>
#include <stdexcept>

#include "tests/cpp/core/auto/layered_model.h"
#include "tests/cpp/core/base/expect_throw.h"

namespace torchext::core::testing {
namespace {

TEST(CostTable, IsExactAtItsPointsAndLinearBetween) {
  const CostTable table({{4, 1}, {8, 3}, {16, 4}});
  EXPECT_EQ(table.seconds(4), 1);
  EXPECT_EQ(table.seconds(8), 3);
  EXPECT_EQ(table.seconds(16), 4);
  EXPECT_DOUBLE_EQ(table.seconds(6), 2);
  EXPECT_DOUBLE_EQ(table.seconds(10), 3.25);
}

TEST(CostTable, BelowTheFirstPointItsTimeAndBeyondTheLastItsSlope) {
  const CostTable table({{4, 1}, {8, 3}, {16, 4}});
  EXPECT_EQ(table.seconds(0), 1);
  EXPECT_DOUBLE_EQ(table.seconds(24), 5);
}

TEST(CostTable, ASizeTakesNoLongerThanALargerOne) {
  const CostTable table({{1, 5}, {2, 3}, {4, 4}, {8, 3.5}});
  const std::vector<CostPoint> expected{{1, 3}, {2, 3}, {4, 3.5}, {8, 3.5}};
  EXPECT_EQ(table.points(), expected);
  // The last segment is flat: what rises before it goes on.
  EXPECT_DOUBLE_EQ(table.seconds(16), 3.5 + 8 * 0.25);
}

TEST(CostTable, WhatWasNotMeasuredIsNotFree) {
  EXPECT_DOUBLE_EQ(CostTable({{10, 2}}).seconds(30), 6);          // one point
  EXPECT_DOUBLE_EQ(CostTable({{5, 2}, {10, 2}}).seconds(30), 6);  // no rise
  EXPECT_EQ(CostTable({{0, 2}}).seconds(30), 2);
}

TEST(CostTable, ALineIsOneEverywhere) {
  const CostTable line = CostTable::line(2, 0.5);
  for (const std::size_t bytes : {0U, 1U, 7U, 1U << 20U, 1U << 24U}) {
    EXPECT_DOUBLE_EQ(line.seconds(bytes), 2 + 0.5 * static_cast<double>(bytes));
  }
  EXPECT_EQ(CostTable::line(3, 0).seconds(std::size_t{1} << 30U), 3);
}

TEST(CostTable, RandomTablesAreMonotoneAndNeverAboveTheMeasured) {
  Random random(5);
  for (int round = 0; round < 300; ++round) {
    std::vector<CostPoint> measured;
    for (std::size_t bytes = 1 + random.below(5); measured.size() < 8; bytes += 1 + random.below(9)) {
      measured.push_back({bytes, random.uniform()});
    }
    const CostTable table(measured);
    double before = 0;
    for (std::size_t bytes = 0; bytes < 100; ++bytes) {
      ASSERT_GE(table.seconds(bytes), before);
      before = table.seconds(bytes);
    }
    for (std::size_t i = 0; i < measured.size(); ++i) {
      ASSERT_LE(table.seconds(measured[i].bytes), measured[i].seconds);
      ASSERT_EQ(table.seconds(measured[i].bytes), table.points()[i].seconds);
    }
    ASSERT_EQ(CostTable(table.points()).points(), table.points());
  }
}

TEST(CostTable, BadPointsAreNamed) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THROW_MESSAGE(CostTable({}), std::invalid_argument, "number of points of a cost table = 0");
  EXPECT_THROW_MESSAGE(CostTable({{8, kNan}}), std::invalid_argument, "seconds = nan");
  EXPECT_THROW_MESSAGE(CostTable({{1, 1}, {8, -2}}), std::invalid_argument, "seconds = -2");
  EXPECT_THROW_MESSAGE(CostTable({{8, 1}, {8, 2}}), std::invalid_argument, "bytes = 8: allowed more than");
}

}  // namespace
}  // namespace torchext::core::testing
