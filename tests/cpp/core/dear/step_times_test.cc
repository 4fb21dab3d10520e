#include "core/dear/step_times.h"

#include <gtest/gtest.h>

#include <random>
#include <stdexcept>
#include <vector>

namespace torchext::core {
namespace {

std::vector<double> steps(double mean, double deviation, int count, std::mt19937_64& generator) {
  std::normal_distribution<double> distribution(mean, deviation);
  std::vector<double> result;
  for (int i = 0; i < count; ++i) {
    result.push_back(distribution(generator));
  }
  return result;
}

TEST(StepTimes, TheMedianOfAnEvenNumberIsBetweenTheTwoInTheMiddle) {
  EXPECT_EQ(median({3}), 3);
  EXPECT_EQ(median({9, 1, 5}), 5);
  EXPECT_EQ(median({8, 1, 2, 4}), 3);
  EXPECT_EQ(mean({8, 1, 2, 5}), 4);
  EXPECT_THROW(median({}), std::invalid_argument);
  EXPECT_THROW(mean({}), std::invalid_argument);
}

// Means 2 and 4; standard errors of both sqrt(1/3), of the difference sqrt(2/3): 2.449 of them apart.
TEST(StepTimes, FasterIsCountedInStandardErrorsOfTheDifference) {
  const std::vector<double> fast{1, 2, 3};
  const std::vector<double> slow{3, 4, 5};
  EXPECT_TRUE(clearlyFaster(fast, slow, 2.44));
  EXPECT_FALSE(clearlyFaster(fast, slow, 2.46));
  EXPECT_FALSE(clearlyFaster(slow, fast, 0));
  EXPECT_FALSE(clearlyFaster(fast, fast, 0));
}

TEST(StepTimes, WithoutVarianceAnyDifferenceIsCertain) {
  EXPECT_TRUE(clearlyFaster({1, 1}, {1.001, 1.001}, 2));
  EXPECT_FALSE(clearlyFaster({1, 1}, {1, 1}, 2));
}

TEST(StepTimes, OneStepSaysNothing) {
  EXPECT_FALSE(clearlyFaster({1}, {9, 9}, 2));
  EXPECT_FALSE(clearlyFaster({1, 1}, {9}, 2));
}

// What a trainer on a busy machine needs: of equal ways few win by chance, one that saves a tenth nearly always does.
TEST(StepTimes, ChanceSeldomWinsAndATenthNearlyAlways) {
  std::mt19937_64 generator(8);
  int by_chance = 0;
  int rightly = 0;
  for (int i = 0; i < 1000; ++i) {
    by_chance += clearlyFaster(steps(190, 15, 20, generator), steps(190, 15, 20, generator), 2) ? 1 : 0;
    rightly += clearlyFaster(steps(171, 15, 20, generator), steps(190, 15, 20, generator), 2) ? 1 : 0;
  }
  EXPECT_LT(by_chance, 50);
  EXPECT_GT(rightly, 950);
}

}  // namespace
}  // namespace torchext::core
