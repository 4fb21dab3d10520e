// Products on matrix tiles against double, for sizes around the blocks' borders, strides, a last column, both layouts
// of results. Without tiles in the processor there is nothing to run, and the tests skip.
#include "kernels/cpu/tiles.h"

#if TORCHEXT_TILES

#include <cmath>
#include <random>
#include <vector>

#include <gtest/gtest.h>

namespace torchext::cpu {
namespace {

class Tiles : public testing::Test {
 protected:
  void SetUp() override {
    if (!cpuHasTiles()) {
      GTEST_SKIP() << "this processor has no AMX, or the system does not let us use it";
    }
  }

  std::vector<float> normals(std::int64_t count, float scale = 1.0F) {
    std::normal_distribution<float> normal(0.0F, scale);
    std::vector<float> values(static_cast<std::size_t>(count));
    for (float& value : values) {
      value = normal(random_);
    }
    return values;
  }

 private:
  std::mt19937 random_{1};
};

struct Product {
  std::vector<double> values;
  std::vector<double> magnitudes;  // sums of |a b|, which errors are measured by
};

Product inDouble(const TileSource& a, std::int64_t inner, const TileSource& b) {
  const auto size = static_cast<std::size_t>(a.rows * b.columns);
  Product product{std::vector<double>(size, 0), std::vector<double>(size, 0)};
  for (std::int64_t i = 0; i < a.rows; ++i) {
    for (std::int64_t k = 0; k < inner; ++k) {
      const double left = k < a.columns ? a.data[i * a.stride + k] : a.last != nullptr ? a.last[i] : 0.0F;
      for (std::int64_t j = 0; j < b.columns; ++j) {
        const double term = left * b.data[k * b.stride + j];
        product.values[static_cast<std::size_t>(i * b.columns + j)] += term;
        product.magnitudes[static_cast<std::size_t>(i * b.columns + j)] += std::abs(term);
      }
    }
  }
  return product;
}

std::vector<TileBlock> leftOf(const TileSource& from, std::int64_t inner) {
  const std::int64_t steps = tileBlocks(inner);
  std::vector<TileBlock> blocks(static_cast<std::size_t>(tileBlocks(from.rows) * steps));
  for (std::int64_t row = 0; row < tileBlocks(from.rows); ++row) {
    layLeft(from, row, inner, blocks.data() + row * steps);
  }
  return blocks;
}

std::vector<TileBlock> rightOf(const TileSource& from) {
  const std::int64_t steps = tileBlocks(from.rows);
  std::vector<TileBlock> blocks(static_cast<std::size_t>(tileBlocks(from.columns) * steps));
  for (std::int64_t column = 0; column < tileBlocks(from.columns); ++column) {
    layRight(from, column, blocks.data() + column * steps);
  }
  return blocks;
}

// Into memory, of operands that are laid out.
void multiplyLaid(const TileBlock* left, const TileBlock* right, std::int64_t rows, std::int64_t inner,
                  std::int64_t columns, float* to, std::int64_t stride) {
  const std::int64_t steps = tileBlocks(inner);
  for (std::int64_t row = 0; row < tileBlocks(rows); ++row) {
    for (std::int64_t column = 0; column < tileBlocks(columns); ++column) {
      multiplyToMatrix(left + row * steps, right + column * steps, steps,
                       to + row * kTileBlock * stride + column * kTileBlock, stride,
                       std::min(kTileBlock, rows - row * kTileBlock),
                       std::min(kTileBlock, columns - column * kTileBlock), nullptr);
    }
  }
}

// Of a float matrix, relative to that of the expected one.
double errorOf(const std::vector<float>& found, const std::vector<double>& expected) {
  double error = 0;
  double norm = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    error += std::pow(found[i] - expected[i], 2);
    norm += std::pow(expected[i], 2);
  }
  return std::sqrt(error / norm);
}

// left[m, k] right[k, n].
template <class Left, class Right>
std::vector<double> productInDouble(const std::vector<Left>& left, const std::vector<Right>& right, std::size_t m,
                                    std::size_t k, std::size_t n) {
  std::vector<double> product(m * n, 0);
  for (std::size_t i = 0; i < m; ++i) {
    for (std::size_t l = 0; l < k; ++l) {
      for (std::size_t j = 0; j < n; ++j) {
        product[i * n + j] += static_cast<double>(left[i * k + l]) * static_cast<double>(right[l * n + j]);
      }
    }
  }
  return product;
}

// The product in memory, with a guard behind every row.
constexpr float kGuard = 12345.0F;

std::vector<float> product(const TileSource& a, std::int64_t inner, const TileSource& b) {
  const std::int64_t stride = b.columns + 3;
  std::vector<float> result(static_cast<std::size_t>(a.rows * stride), kGuard);
  const auto left = leftOf(a, inner);
  const auto right = rightOf(b);
  configureTiles();
  multiplyLaid(left.data(), right.data(), a.rows, inner, b.columns, result.data(), stride);
  releaseTiles();
  return result;
}

// Of each element's terms: two splits and what is left out, and the sum in float.
double allowed(std::int64_t inner) { return 3.1 * std::ldexp(1.0, -16) + std::ldexp(static_cast<double>(inner), -24); }

void compare(const std::vector<float>& found, const Product& expected, const TileSource& a, const TileSource& b,
             std::int64_t inner) {
  const std::int64_t stride = b.columns + 3;
  for (std::int64_t i = 0; i < a.rows; ++i) {
    for (std::int64_t j = 0; j < stride; ++j) {
      const float value = found[static_cast<std::size_t>(i * stride + j)];
      if (j >= b.columns) {
        ASSERT_EQ(value, kGuard) << "written behind row " << i;
        continue;
      }
      const auto at = static_cast<std::size_t>(i * b.columns + j);
      ASSERT_NEAR(value, expected.values[at], allowed(inner) * expected.magnitudes[at] + 1e-30)
          << i << ", " << j << " of " << a.rows << " x " << inner << " x " << b.columns;
    }
  }
}

TEST_F(Tiles, MultiplyAnySizes) {
  for (const std::int64_t rows : {1, 15, 16, 17, 32, 33, 70}) {
    for (const std::int64_t inner : {1, 2, 31, 32, 33, 65}) {
      for (const std::int64_t columns : {1, 15, 16, 17, 32, 33, 64, 65}) {
        const auto left = normals(rows * (inner + 1));
        const auto right = normals(inner * (columns + 2));
        const TileSource a{left.data(), inner + 1, rows, inner};
        const TileSource b{right.data(), columns + 2, inner, columns};
        compare(product(a, inner, b), inDouble(a, inner, b), a, b, inner);
      }
    }
  }
}

TEST_F(Tiles, TakeALastColumnThatLiesElsewhere) {
  for (const std::int64_t columns : {1, 31, 32, 33, 63, 64}) {
    const std::int64_t rows = 37;
    const auto left = normals(rows * columns);
    const auto last = normals(rows);
    const auto right = normals((columns + 1) * 40);
    const TileSource a{left.data(), columns, rows, columns, last.data()};
    const TileSource without{left.data(), columns, rows, columns};
    const TileSource b{right.data(), 40, columns + 1, 40};
    compare(product(a, columns + 1, b), inDouble(a, columns + 1, b), a, b, columns + 1);
    compare(product(without, columns + 1, b), inDouble(without, columns + 1, b), a, b, columns + 1);
  }
}

TEST_F(Tiles, GiveTheColumnBehindTheMatrixToAnotherPlace) {
  const auto left = normals(20 * 50);
  const auto right = normals(50 * 18);
  const TileSource a{left.data(), 50, 20, 50};
  const TileSource b{right.data(), 18, 50, 18};
  const auto whole = product(a, 50, b);
  const auto of_a = leftOf(a, 50);
  const auto of_b = rightOf(b);
  std::vector<float> matrix(20 * 17, kGuard);
  std::vector<float> last(20, kGuard);
  configureTiles();
  multiplyToMatrix(of_a.data(), of_b.data(), 2, matrix.data(), 17, 20, 17, last.data());
  releaseTiles();
  for (std::size_t i = 0; i < 20; ++i) {
    for (std::size_t j = 0; j < 17; ++j) {
      ASSERT_EQ(matrix[i * 17 + j], whole[i * 21 + j]);
    }
    ASSERT_EQ(last[i], whole[i * 21 + 17]);
  }
}

// a (b c) and (a b) c, with the first product laid out for the second.
TEST_F(Tiles, ChainProducts) {
  const std::int64_t m = 45;
  const std::int64_t n = 70;
  const auto outer = normals(m * m);
  const auto middle = normals(m * n);
  const auto inner = normals(n * n);
  const auto of_x = leftOf({middle.data(), n, m, n}, n);
  const auto of_a = rightOf({inner.data(), n, n, n});
  const auto of_g = leftOf({outer.data(), m, m, m}, m);
  std::vector<TileBlock> between(static_cast<std::size_t>(tileBlocks(n) * tileBlocks(m)));
  std::vector<float> result(static_cast<std::size_t>(m * n), kGuard);
  configureTiles();
  for (std::int64_t row = 0; row < tileBlocks(m); ++row) {
    for (std::int64_t column = 0; column < tileBlocks(n); ++column) {
      multiplyToRight(of_x.data() + row * tileBlocks(n), of_a.data() + column * tileBlocks(n), tileBlocks(n),
                      between[static_cast<std::size_t>(column * tileBlocks(m) + row)]);
    }
  }
  multiplyLaid(of_g.data(), between.data(), m, m, n, result.data(), n);
  releaseTiles();
  EXPECT_LT(errorOf(result, productInDouble(outer, productInDouble(middle, inner, m, n, n), m, m, n)), 1e-5);
}

// Beyond the eight bits of bfloat16 the low part counts; small and large numbers keep it.
TEST_F(Tiles, KeepSixteenBits) {
  const std::vector<float> left{1.0F + std::ldexp(1.0F, -12), -3.0F, std::ldexp(1.0F, -100), 1e30F};
  const std::vector<float> right{1.0F};
  const TileSource a{left.data(), 1, 4, 1};
  const TileSource b{right.data(), 1, 1, 1};
  const auto found = product(a, 1, b);
  for (std::size_t i = 0; i < left.size(); ++i) {
    EXPECT_NEAR(found[i * 4], left[i], std::ldexp(std::abs(left[i]), -16));
  }
  EXPECT_NE(found[0], 1.0F);
}

}  // namespace
}  // namespace torchext::cpu

#endif
