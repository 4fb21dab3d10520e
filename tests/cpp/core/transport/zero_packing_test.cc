#include "core/transport/zero_packing.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstddef>
#include <limits>
#include <optional>
#include <random>
#include <vector>

namespace torchext::core {
namespace {

template <class T>
class ZeroPacking : public ::testing::Test {};
using Types = ::testing::Types<float, double>;
TYPED_TEST_SUITE(ZeroPacking, Types);

template <class T>
std::vector<T> someZeros(std::size_t count, double share, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<T> values(count);
  for (T& value : values) {
    value = std::uniform_real_distribution(0.0, 1.0)(random) < share ? T(0) : static_cast<T>(random()) - T(2e9);
  }
  return values;
}

// Every count around a mask's width, and all shares of zeros: back again, by the bits.
TYPED_TEST(ZeroPacking, ThereAndBack) {
  using T = TypeParam;
  for (std::size_t count = 0; count < 200; ++count) {
    for (const double share : {0.0, 0.3, 0.9, 1.0}) {
      std::vector<T> values = someZeros<T>(count, share, static_cast<unsigned>(count));
      if (count > 3) {
        values[1] = T(-0.0);
        values[2] = std::numeric_limits<T>::quiet_NaN();
        values[3] = std::numeric_limits<T>::denorm_min();
      }
      std::size_t others = 0;
      for (const T value : values) {
        others += std::bit_cast<ZeroMask<T>>(value) != 0 ? 1 : 0;
      }
      const std::size_t length = (count + 8 * sizeof(T) - 1) / (8 * sizeof(T)) + others;
      std::vector<T> packed(length + 1, T(7));
      ASSERT_EQ(packZeros(values.data(), count, packed.data(), length), length);
      EXPECT_EQ(packed[length], T(7));
      std::vector<T> back(count + 1, T(9));
      ASSERT_EQ(unpackZeros(packed.data(), length, count, back.data()), length);
      EXPECT_EQ(back[count], T(9));
      for (std::size_t i = 0; i < count; ++i) {
        ASSERT_EQ(std::bit_cast<ZeroMask<T>>(back[i]), std::bit_cast<ZeroMask<T>>(values[i])) << count << ": " << i;
      }
    }
  }
}

// Whatever the room, nothing is written behind it.
TYPED_TEST(ZeroPacking, TooLittleRoom) {
  using T = TypeParam;
  const std::vector<T> values = someZeros<T>(150, 0.5, 1);
  std::vector<T> packed(200);
  const std::optional<std::size_t> length = packZeros(values.data(), values.size(), packed.data(), packed.size());
  ASSERT_TRUE(length.has_value());
  for (std::size_t room = 0; room < *length; ++room) {
    std::vector<T> small(room + 1, T(7));
    EXPECT_EQ(packZeros(values.data(), values.size(), small.data(), room), std::nullopt);
    EXPECT_EQ(small[room], T(7));
    std::vector<T> back(values.size());
    EXPECT_EQ(unpackZeros(packed.data(), room, values.size(), back.data()), std::nullopt);
  }
}

// Bits of a mask behind the last number stand for nothing.
TYPED_TEST(ZeroPacking, BitsBehindTheEnd) {
  using T = TypeParam;
  std::vector<T> packed{std::bit_cast<T>(static_cast<ZeroMask<T>>(~ZeroMask<T>{0})), T(1), T(2), T(3)};
  std::vector<T> back(4, T(9));
  EXPECT_EQ(unpackZeros(packed.data(), packed.size(), 3, back.data()), 4U);
  EXPECT_EQ(back, (std::vector<T>{T(1), T(2), T(3), T(9)}));
}

}  // namespace
}  // namespace torchext::core
