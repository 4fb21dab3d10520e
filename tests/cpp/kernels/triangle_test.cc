// What the threads of the CUDA kernels do with packed triangles, run on the host one by one.
#include "kernels/triangle.h"

#include <gtest/gtest.h>

#include <numeric>
#include <set>
#include <utility>
#include <vector>

#include "core/kfac/packed_triangle.h"

namespace torchext::triangle {
namespace {

std::size_t sizeOf(std::int64_t elements) { return static_cast<std::size_t>(elements); }

std::vector<double> numbers(std::int64_t count, double first) {
  std::vector<double> values(sizeOf(count));
  std::iota(values.begin(), values.end(), first);
  return values;
}

TEST(Triangle, SizesAndRowsAreThoseOfTheCore) {
  for (std::int64_t d = 0; d < 70; ++d) {
    EXPECT_EQ(sizeOf(packedSize(d)), core::packedSize(sizeOf(d)));
    for (std::int64_t row = 0; row < d; ++row) {
      EXPECT_EQ(sizeOf(rowBegin(row, d)), core::packedRow(sizeOf(row), sizeOf(d)));
    }
  }
  EXPECT_EQ(packedSize(100'000), 5'000'050'000);  // beyond 32 bits
  EXPECT_EQ(rowBegin(99'999, 100'000), 5'000'049'999);
}

void packingIsTheCores(std::int64_t more) {
  for (const std::int64_t d : {1, 2, 3, 31, 32, 33, 64, 100}) {
    const std::int64_t stride = d + more;
    const auto full = numbers(stride * stride, 1);
    std::vector<double> expected(sizeOf(packedSize(d)));
    core::packTriangle(full.data(), sizeOf(stride), sizeOf(d), expected.data());
    for (const std::int64_t lanes : {1, 7, 32, 128}) {
      for (const bool add : {false, true}) {
        std::vector<double> packed(expected.size(), 0.25);
        for (std::int64_t row = 0; row < d; ++row) {
          for (std::int64_t lane = 0; lane < lanes; ++lane) {
            packRow(full.data(), stride, d, row, add, lane, lanes, packed.data());
          }
        }
        for (std::size_t i = 0; i < packed.size(); ++i) {
          ASSERT_EQ(packed[i], expected[i] + (add ? 0.25 : 0)) << d << " rows, " << lanes << " lanes, element " << i;
        }
      }
    }
  }
}

TEST(Triangle, PackingIsTheCores) { packingIsTheCores(0); }
TEST(Triangle, PackingOfAPartOfAMatrixIsTheCores) { packingIsTheCores(3); }

TEST(Triangle, EveryTileOfTheUpperHalfHasOneNumber) {
  for (const std::int64_t d : {1, 31, 32, 33, 64, 65, 500, 3000}) {
    std::set<std::pair<std::int64_t, std::int64_t>> seen;
    for (std::int64_t number = 0; number < tilesOf(d); ++number) {
      const Tile tile = tileAt(number, d);
      EXPECT_EQ(tile.top % kTile, 0);
      EXPECT_EQ(tile.left % kTile, 0);
      EXPECT_GE(tile.top, 0);
      EXPECT_LE(tile.top, tile.left);
      EXPECT_LT(tile.left, d);
      EXPECT_TRUE(seen.emplace(tile.top, tile.left).second);
    }
    const std::int64_t side = (d + kTile - 1) / kTile;
    EXPECT_EQ(seen.size(), sizeOf(side * (side + 1) / 2));
  }
}

TEST(Triangle, TilesOfALargeMatrixAreFoundExactly) {
  constexpr std::int64_t kDim = 32 * 1'000'000;  // where a rounded square root is off
  for (const std::int64_t row : {0L, 1L, 77L, 333'333L, 999'998L, 999'999L}) {
    const std::int64_t first = rowBegin(row, 1'000'000);
    EXPECT_EQ(tileAt(first, kDim).top, row * kTile);
    EXPECT_EQ(tileAt(first, kDim).left, row * kTile);
    const std::int64_t last = rowBegin(row + 1, 1'000'000) - 1;
    EXPECT_EQ(tileAt(last, kDim).top, row * kTile);
    EXPECT_EQ(tileAt(last, kDim).left, kDim - kTile);
  }
}

TEST(Triangle, UnpackingIsTheCores) {
  for (const std::int64_t d : {1, 2, 31, 32, 33, 64, 70, 97}) {
    const auto packed = numbers(packedSize(d), 1);
    std::vector<double> expected(sizeOf(d * d));
    core::unpackTriangle(packed.data(), sizeOf(d), expected.data(), sizeOf(d));
    for (const int lines : {1, 8, 32}) {
      std::vector<double> full(expected.size(), -1);
      for (std::int64_t number = 0; number < tilesOf(d); ++number) {
        const Tile tile = tileAt(number, d);
        std::vector<double> buffer(sizeOf(kTile * (kTile + 1)), -2);
        const auto threads = [&](const auto& body) {
          for (int y = 0; y < lines; ++y) {
            for (int x = 0; x < kTile; ++x) {
              body(x, y);
            }
          }
        };
        threads([&](int x, int y) { loadTile(packed.data(), d, tile, x, y, lines, buffer.data()); });
        threads([&](int x, int y) { storeTile(buffer.data(), d, tile, x, y, lines, full.data()); });
      }
      ASSERT_EQ(full, expected) << d << " rows, " << lines << " lines of threads";
    }
  }
}

}  // namespace
}  // namespace torchext::triangle
