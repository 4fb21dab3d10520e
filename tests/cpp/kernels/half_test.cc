// Every float16 and bfloat16 value, and every rounding border between two of them, against arithmetic in double.
#include "kernels/cpu/half.h"

#include <cmath>
#include <limits>
#include <random>

#include <gtest/gtest.h>

namespace torchext::cpu {
namespace {

// The value of float16 bits by the definition of the format, in double.
double half_value(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 0x1F;
  const int mantissa = bits & 0x3FF;
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == 31) {
    return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
  }
  return exponent == 0 ? sign * std::ldexp(mantissa, -24) : sign * std::ldexp(1024 + mantissa, exponent - 25);
}

TEST(Half, EveryValueConvertsExactlyAndComesBack) {
  for (std::uint32_t bits = 0; bits <= 0xFFFF; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    const float value = halfToFloat(half);
    if (std::isnan(half_value(half))) {
      EXPECT_TRUE(std::isnan(value)) << bits;
      EXPECT_TRUE(std::isnan(half_value(floatToHalf(value)))) << bits;
      continue;
    }
    ASSERT_EQ(static_cast<double>(value), half_value(half)) << bits;
    ASSERT_EQ(std::signbit(value), (bits & 0x8000) != 0) << bits;
    ASSERT_EQ(floatToHalf(value), half) << bits;
  }
}

TEST(Half, BordersRoundToNearestEven) {
  for (std::uint32_t bits = 0; bits < 0x7BFF; ++bits) {  // every finite pair of neighbours, subnormals included
    const auto low = static_cast<std::uint16_t>(bits);
    const auto high = static_cast<std::uint16_t>(bits + 1);
    const auto middle = static_cast<float>((half_value(low) + half_value(high)) / 2);  // exact in float
    const std::uint16_t even = (low & 1) == 0 ? low : high;
    ASSERT_EQ(floatToHalf(middle), even) << bits;
    ASSERT_EQ(floatToHalf(-middle), even | 0x8000) << bits;
    ASSERT_EQ(floatToHalf(std::nextafter(middle, 0.0F)), low) << bits;
    ASSERT_EQ(floatToHalf(std::nextafter(middle, 1e9F)), high) << bits;
  }
}

TEST(Half, TooLargeBecomesInfinityAndTooSmallZero) {
  EXPECT_EQ(floatToHalf(65519.996F), 0x7BFF);
  EXPECT_EQ(floatToHalf(65520.0F), 0x7C00);
  EXPECT_EQ(floatToHalf(-std::numeric_limits<float>::max()), 0xFC00);
  EXPECT_EQ(floatToHalf(-std::numeric_limits<float>::infinity()), 0xFC00);
  EXPECT_EQ(floatToHalf(0x1p-25F), 0);  // a tie between 0 and the smallest subnormal
  EXPECT_EQ(floatToHalf(0x1.000002p-25F), 1);
  EXPECT_EQ(floatToHalf(std::numeric_limits<float>::denorm_min()), 0);
}

TEST(BFloat16, EveryValueConvertsExactlyAndComesBack) {
  for (std::uint32_t bits = 0; bits <= 0xFFFF; ++bits) {
    const auto bfloat = static_cast<std::uint16_t>(bits);
    const float value = bfloatToFloat(bfloat);
    ASSERT_EQ(std::bit_cast<std::uint32_t>(value), bits << 16);
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(bfloatToFloat(floatToBfloat(value)))) << bits;
    } else {
      ASSERT_EQ(floatToBfloat(value), bfloat) << bits;
    }
  }
}

TEST(BFloat16, BordersRoundToNearestEven) {
  for (std::uint32_t bits = 0; bits < 0x7F7F; ++bits) {
    const std::uint32_t even = (bits & 1) == 0 ? bits : bits + 1;
    const float middle = std::bit_cast<float>((bits << 16) | 0x8000U);
    ASSERT_EQ(floatToBfloat(middle), even) << bits;
    ASSERT_EQ(floatToBfloat(std::bit_cast<float>((bits << 16) | 0x7FFFU)), bits) << bits;
    ASSERT_EQ(floatToBfloat(std::bit_cast<float>((bits << 16) | 0x8001U)), bits + 1) << bits;
  }
  EXPECT_EQ(floatToBfloat(std::numeric_limits<float>::max()), 0x7F80);
}

}  // namespace
}  // namespace torchext::cpu
