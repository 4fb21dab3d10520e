#include "core/kfac/packed_triangle.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace torchext::core {
namespace {

TEST(PackedTriangle, SizesAndRows) {
  EXPECT_EQ(packedSize(0), 0U);
  EXPECT_EQ(packedSize(1), 1U);
  EXPECT_EQ(packedSize(257), 33153U);
  EXPECT_EQ(packedRow(0, 5), 0U);
  EXPECT_EQ(packedRow(1, 5), 5U);
  EXPECT_EQ(packedRow(4, 5), 14U);
}

// Sizes around the block of unpackTriangle, and rows that are longer than the matrix.
TEST(PackedTriangle, ThereAndBack) {
  for (const std::size_t d : {1U, 2U, 7U, 31U, 32U, 33U, 70U}) {
    const std::size_t stride = d + 3;
    std::vector<double> full(d * stride, -1);
    for (std::size_t i = 0; i < d; ++i) {
      for (std::size_t j = i; j < d; ++j) {
        full[i * stride + j] = static_cast<double>(i * d + j);
      }
    }
    std::vector<double> packed(packedSize(d), -2);
    packTriangle(full.data(), stride, d, packed.data());
    std::vector<double> back(d * stride, -3);
    unpackTriangle(packed.data(), d, back.data(), stride);
    double trace = 0;
    for (std::size_t i = 0; i < d; ++i) {
      trace += full[i * stride + i];
      for (std::size_t j = 0; j < stride; ++j) {
        const double expected = j >= d ? -3 : static_cast<double>(std::min(i, j) * d + std::max(i, j));
        ASSERT_EQ(back[i * stride + j], expected) << d << ": " << i << ", " << j;
      }
    }
    EXPECT_EQ(packedTrace(packed.data(), d), trace);
    addTriangle(full.data(), stride, d, 2.0, packed.data());
    for (std::size_t i = 0; i < d; ++i) {
      for (std::size_t j = i; j < d; ++j) {
        ASSERT_EQ(packed[packedRow(i, d) + j - i], 3 * full[i * stride + j]);
      }
    }
  }
}

TEST(PackedTriangle, TraceTellsWhatIsNotFinite) {
  std::vector<float> packed{1, 2, 3};
  EXPECT_EQ(packedTrace(packed.data(), 2), 4);
  packed[2] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(std::isnan(packedTrace(packed.data(), 2)));
}

}  // namespace
}  // namespace torchext::core
