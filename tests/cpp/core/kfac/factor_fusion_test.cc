#include "core/kfac/factor_fusion.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "core/base/check.h"
#include "core/base/random.h"

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

// When the last bucket has arrived.
double end(const std::vector<FusionTask>& tasks, const Ends& ends) {
  double link_free = 0;
  double ready = 0;
  int next = 0;
  for (const int last : ends) {
    std::size_t bytes = 0;
    for (; next < last; ++next) {
      bytes += tasks[index(next)].bytes;
      ready = std::max(ready, tasks[index(next)].ready);
    }
    link_free = std::max(ready, link_free) + kCost.seconds(bytes);
  }
  return link_free;
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
    const Ends ends = fuseFactors(tasks, kCost);
    ASSERT_EQ(ends.back(), alone.back());
    ASSERT_LE(end(tasks, ends), end(tasks, alone));
  }
}

}  // namespace
}  // namespace torchext::core
