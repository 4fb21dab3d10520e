// Samples with a 1 more at their end, element by element as the CUDA kernel copies them.
#include "kernels/padded_samples.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <vector>

namespace torchext::padded_samples {
namespace {

TEST(Samples, LengthsAreMultiplesOfFourAndNoMoreThanNeeded) {
  for (std::int64_t length = 0; length < 100; ++length) {
    EXPECT_EQ(alignedTo(length) % kAligned, 0);
    EXPECT_GE(alignedTo(length), length);
    EXPECT_LT(alignedTo(length), length + kAligned);
  }
}

TEST(Samples, OnesFollowTheSamplesAndZerosTheOnes) {
  constexpr std::int64_t kRows = 3;
  constexpr std::int64_t kColumns = 5;
  std::vector<float> memory;
  for (std::int64_t i = 0; i < kRows * kColumns; ++i) {
    memory.push_back(static_cast<float>(i + 10));
  }
  const Strided<float> by_rows{memory.data(), kRows, kColumns, kColumns, 1};
  const Strided<float> by_columns{memory.data(), kColumns, kRows, 1, kColumns};
  for (std::int64_t row = 0; row < kRows; ++row) {
    for (std::int64_t column = 0; column < alignedTo(kColumns + 1); ++column) {
      const float expected = column < kColumns    ? memory[static_cast<std::size_t>(row * kColumns + column)]
                             : column == kColumns ? 1.0F
                                                  : 0.0F;
      EXPECT_EQ(appended(by_rows, /*ones_in_rows=*/false, row, column), expected) << row << ", " << column;
      EXPECT_EQ(appended(by_columns, /*ones_in_rows=*/true, column, row), expected) << row << ", " << column;
    }
  }
}

}  // namespace
}  // namespace torchext::padded_samples
