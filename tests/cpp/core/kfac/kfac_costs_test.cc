#include "core/kfac/kfac_costs.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

#include "tests/cpp/core/base/expect_throw.h"

namespace torchext::core {
namespace {

TEST(KfacCosts, InversionIsCubic) {
  std::vector<InversionSample> samples;
  for (const std::size_t dim : {16U, 64U, 256U, 1024U}) {
    const auto d = static_cast<double>(dim);
    samples.push_back({dim, 1e-5 + 4e-11 * d * d * d});
  }
  const InversionCost cost = fitInversion(samples);
  EXPECT_NEAR(cost.fixed, 1e-5, 1e-9);
  EXPECT_NEAR(cost.cubic, 4e-11, 1e-15);
  EXPECT_NEAR(cost.seconds(512), 1e-5 + 4e-11 * 512 * 512 * 512, 1e-8);
}

TEST(KfacCosts, WantsTwoSizesAndRealTimes) {
  EXPECT_THROW_MESSAGE(fitInversion({}), std::invalid_argument, "two different sizes");
  EXPECT_THROW_MESSAGE(fitInversion({{8, 1}, {16, -1}}), std::invalid_argument, "seconds = -1");
}

}  // namespace
}  // namespace torchext::core
