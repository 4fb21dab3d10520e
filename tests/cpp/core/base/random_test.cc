#include "core/base/random.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace torchext::core {
namespace {

// The published output of splitmix64 seeding xoshiro256** with seed 0: hosts that disagree here draw different groups.
TEST(Random, SameNumbersEverywhere) {
  Random random(0);
  EXPECT_EQ(random.next(), 11091344671253066420ULL);
  EXPECT_EQ(random.next(), 13793997310169335082ULL);
  EXPECT_EQ(random.next(), 1900383378846508768ULL);
}

TEST(Random, BelowIsUniformAndInRange) {
  Random random(7);
  std::vector<int> counts(6, 0);
  constexpr int kDraws = 60000;
  for (int i = 0; i < kDraws; ++i) {
    const auto value = random.below(6);
    ASSERT_LT(value, 6U);
    ++counts[value];
  }
  for (const int count : counts) {
    EXPECT_NEAR(count, kDraws / 6, 400);  // more than four standard deviations (91)
  }
  EXPECT_EQ(random.below(1), 0U);
}

// A bound just above half the range is where a plain modulo would favour low numbers by 2 to 1.
TEST(Random, BelowHasNoModuloBias) {
  Random random(8);
  constexpr std::uint32_t kBound = 0xC0000000U;
  int low = 0;
  for (int i = 0; i < 30000; ++i) {
    low += random.below(kBound) < kBound / 3 ? 1 : 0;
  }
  EXPECT_NEAR(low, 10000, 400);
}

TEST(Random, UniformStaysBelowOne) {
  Random random(9);
  double sum = 0;
  for (int i = 0; i < 10000; ++i) {
    const double value = random.uniform();
    ASSERT_GE(value, 0.0);
    ASSERT_LT(value, 1.0);
    sum += value;
  }
  EXPECT_NEAR(sum / 10000, 0.5, 0.02);
}

TEST(Random, EveryOrderOfThreeIsEquallyLikely) {
  Random random(10);
  std::vector<int> counts(27, 0);
  for (int i = 0; i < 60000; ++i) {
    std::vector<int> items{0, 1, 2};
    random.shuffle(items);
    ++counts[static_cast<std::size_t>(items[0] * 9 + items[1] * 3 + items[2])];
  }
  EXPECT_EQ(std::count_if(counts.begin(), counts.end(), [](int count) { return count > 0; }), 6);
  for (const int count : counts) {
    if (count > 0) {
      EXPECT_NEAR(count, 10000, 400);
    }
  }
}

}  // namespace
}  // namespace torchext::core
