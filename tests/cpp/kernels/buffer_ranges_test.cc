// forEachPiece against walking the buffer element by element.
#include "kernels/cpu/buffer_ranges.h"

#include <vector>

#include <gtest/gtest.h>

namespace torchext::cpu {
namespace {

std::vector<std::int64_t> offsets_of(const std::vector<std::int64_t>& sizes) {
  std::vector<std::int64_t> offsets{0};
  for (const std::int64_t size : sizes) {
    offsets.push_back(offsets.back() + size);
  }
  return offsets;
}

TEST(Pieces, EveryRangeOfManyListsIsCoveredOnce) {
  const std::vector<std::vector<std::int64_t>> lists = {
      {}, {0}, {5}, {0, 0, 3, 0}, {1, 1, 1}, {4, 0, 0, 2, 7}, {0, 6, 0}, {3, 5, 2, 1}};
  for (const auto& sizes : lists) {
    const auto offsets = offsets_of(sizes);
    for (std::int64_t begin = 0; begin <= offsets.back(); ++begin) {
      for (std::int64_t end = begin; end <= offsets.back(); ++end) {
        std::int64_t next = begin;
        forEachPiece(offsets, begin, end, [&](const Piece& piece) {
          ASSERT_LT(piece.tensor, sizes.size());
          ASSERT_EQ(piece.flat_begin, next);
          ASSERT_GT(piece.count, 0);
          ASSERT_EQ(piece.tensor_begin, piece.flat_begin - offsets[piece.tensor]);
          ASSERT_LE(piece.tensor_begin + piece.count, sizes[piece.tensor]);
          next += piece.count;
        });
        ASSERT_EQ(next, end);
      }
    }
  }
}

}  // namespace
}  // namespace torchext::cpu
