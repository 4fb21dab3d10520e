#include "core/transport/alpha_beta.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

#include "tests/cpp/core/base/expect_throw.h"

namespace torchext::core {
namespace {

TEST(AlphaBeta, FindsTheLineThatMadeTheTimes) {
  std::vector<CommSample> samples;
  for (const std::size_t bytes : {1000U, 10000U, 100000U, 1000000U}) {
    samples.push_back({bytes, 2e-4 + 3e-9 * static_cast<double>(bytes)});
  }
  const AlphaBeta line = fitAlphaBeta(samples);
  EXPECT_NEAR(line.alpha, 2e-4, 1e-10);
  EXPECT_NEAR(line.beta, 3e-9, 1e-15);
}

TEST(AlphaBeta, SmallMessagesWeighAsMuchAsLargeOnes) {
  // The last time is 20 % off. By absolute errors alpha would follow it (to -4e-3, cut off at 0); relatively it stays.
  const AlphaBeta line = fitAlphaBeta({{0, 1e-3}, {1000, 2e-3}, {2000, 3e-3}, {1000000, 1.2}});
  EXPECT_NEAR(line.alpha, 1e-3, 1e-4);
}

TEST(AlphaBeta, NeitherCoefficientIsNegative) {
  const AlphaBeta falling = fitAlphaBeta({{1000, 2e-3}, {2000, 1e-3}});
  EXPECT_EQ(falling.beta, 0);
  EXPECT_GT(falling.alpha, 0);
  const AlphaBeta steep = fitAlphaBeta({{1000, 1e-4}, {2000, 1e-3}});
  EXPECT_EQ(steep.alpha, 0);
  EXPECT_GT(steep.beta, 0);
}

TEST(AlphaBeta, WantsTwoSizesAndRealTimes) {
  EXPECT_THROW_MESSAGE(fitAlphaBeta({}), std::invalid_argument, "two different sizes");
  EXPECT_THROW_MESSAGE(fitAlphaBeta({{8, 1}, {8, 2}}), std::invalid_argument, "two different sizes");
  EXPECT_THROW_MESSAGE(fitAlphaBeta({{8, 1}, {16, 0}}), std::invalid_argument, "seconds = 0");
}

}  // namespace
}  // namespace torchext::core
