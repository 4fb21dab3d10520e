#include "core/factor_fusion.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

#include "core/random.h"
#include "expect_throw.h"

namespace torchext::core {
namespace {

using Ends = std::vector<int>;
constexpr AlphaBeta kCost{1.0, 0.1};  // seconds, seconds a byte

TEST(FactorFusion, WaitsWhereThatCostsLessThanAnAlpha) {
  // The first could leave at 0; the second is ready at 0.5: half an alpha is waited, one is saved.
  EXPECT_EQ(fuseFactors({{10, 0.0, 0}, {10, 0.5, 0}}, kCost), (Ends{2}));
  // At 1.5 waiting costs more than an alpha, though the transfer (2 s) would not be over.
  EXPECT_EQ(fuseFactors({{10, 0.0, 0}, {10, 1.5, 0}}, kCost), (Ends{1, 2}));
}

TEST(FactorFusion, FusesWhatWaitsForTheLinkAnyway) {
  // The first occupies the link up to 11; the others gather meanwhile.
  EXPECT_EQ(fuseFactors({{100, 0.0, 0}, {10, 3.0, 0}, {10, 5.0, 0}, {10, 10.9, 0}, {10, 30, 0}}, kCost),
            (Ends{1, 4, 5}));
}

TEST(FactorFusion, NotBeforeTheTransferWouldEnd) {
  EXPECT_EQ(fuseFactors({{0, 0.0, 0}, {10, 1.01, 0}}, AlphaBeta{1.0, 0.0}), (Ends{1, 2}));
}

TEST(FactorFusion, LanesStayApart) {
  EXPECT_EQ(fuseFactors({{1, 0, 0}, {1, 0, 0}, {1, 0, 1}, {1, 0, 0}}, kCost), (Ends{2, 3, 4}));
  EXPECT_EQ(fuseFactors({}, kCost), Ends{});
}

TEST(FactorFusion, NoLaterThanOneByOneWhereReadyTogether) {
  Random random(6);
  for (int round = 0; round < 200; ++round) {
    std::vector<FusionTask> tasks(1 + random.below(20));
    Ends alone;
    for (std::size_t i = 0; i < tasks.size(); ++i) {
      tasks[i].bytes = random.below(1000);
      alone.push_back(static_cast<int>(i) + 1);
    }
    ASSERT_LE(fusedEnd(tasks, fuseFactors(tasks, kCost), kCost), fusedEnd(tasks, alone, kCost));
  }
}

TEST(FactorFusion, EndOfRuns) {
  EXPECT_DOUBLE_EQ(fusedEnd({{10, 0, 0}, {10, 5, 0}}, {1, 2}, kCost), 7.0);
  EXPECT_DOUBLE_EQ(fusedEnd({{10, 0, 0}, {10, 5, 0}}, {2}, kCost), 8.0);
  EXPECT_THROW_MESSAGE(fusedEnd({{1, 0, 0}, {1, 0, 0}}, {1}, kCost), std::invalid_argument, "factors in runs = 1");
  EXPECT_THROW_MESSAGE(fusedEnd({{1, 0, 0}}, {2}, kCost), std::invalid_argument, "end of a run = 2");
}

}  // namespace
}  // namespace torchext::core
