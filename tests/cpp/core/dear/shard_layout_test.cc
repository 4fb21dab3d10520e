#include "core/dear/shard_layout.h"

#include <numeric>
#include <stdexcept>
#include <vector>

#include <gtest/gtest.h>

#include "core/base/random.h"
#include "tests/cpp/core/base/expect_throw.h"

namespace torchext::core {
namespace {

TEST(ShardLayout, SlicesFollowTorchChunk) {
  // torch.arange(10).chunk(4): 3, 3, 3, 1; torch.arange(5).chunk(4): 2, 2, 1 and nothing
  const std::vector<Span> ten{{0, 3}, {3, 3}, {6, 3}, {9, 1}};
  const std::vector<Span> five{{0, 2}, {2, 2}, {4, 1}, {5, 0}};
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(sliceOf(10, 4, rank), ten[static_cast<std::size_t>(rank)]);
    EXPECT_EQ(sliceOf(5, 4, rank), five[static_cast<std::size_t>(rank)]);
    EXPECT_EQ(sliceOf(0, 4, rank).count, 0U);
  }
}

TEST(ShardLayout, TheNumbersOfASmallBucket) {
  const ShardLayout layout({10, 5, 0}, 4, 4);  // 3 + 2 + 0 elements and 3 marks: 8, made 16 (64 bytes)
  EXPECT_EQ(layout.chunkElements(), 16U);
  EXPECT_EQ(layout.bufferElements(), 64U);
  EXPECT_EQ(layout.position(0, 0), 0U);
  EXPECT_EQ(layout.position(1, 0), 3U);
  EXPECT_EQ(layout.position(1, 2), 35U);
  EXPECT_EQ(layout.markPosition(0, 0), 5U);
  EXPECT_EQ(layout.markPosition(2, 1), 23U);
}

// Every element of every tensor has one owner and one place in the buffer, which nothing else has.
TEST(ShardLayout, PlacesAreAPartition) {
  Random random(3);
  for (int round = 0; round < 300; ++round) {
    const int world_size = 1 + static_cast<int>(random.below(9));
    std::vector<std::size_t> elements(random.below(6));
    for (std::size_t& count : elements) {
      count = random.below(50);
    }
    const ShardLayout layout(elements, round % 2 == 0 ? 4 : 2, world_size);
    ASSERT_EQ(layout.chunkElements() * (round % 2 == 0 ? 4 : 2) % 64, 0U);
    std::vector<int> used(layout.bufferElements(), 0);
    for (int tensor = 0; tensor < layout.tensorCount(); ++tensor) {
      std::size_t next = 0;
      for (int rank = 0; rank < world_size; ++rank) {
        const Span slice = layout.slice(tensor, rank);
        ASSERT_TRUE(slice.count == 0 || slice.begin == next);
        next += slice.count;
        for (std::size_t i = 0; i < slice.count; ++i) {
          ++used.at(layout.position(tensor, rank) + i);
        }
        ++used.at(layout.markPosition(tensor, rank));
        ASSERT_EQ(layout.markPosition(tensor, rank) / layout.chunkElements(), static_cast<std::size_t>(rank));
      }
      ASSERT_EQ(next, elements[static_cast<std::size_t>(tensor)]);
    }
    for (const int count : used) {
      ASSERT_LE(count, 1);
    }
  }
}

TEST(ShardLayout, BadInputNamesValueAndRange) {
  EXPECT_THROW_MESSAGE(ShardLayout({1}, 0, 1), std::invalid_argument, "element_size = 0");
  EXPECT_THROW_MESSAGE(ShardLayout({1}, 4, 0), std::invalid_argument, "world_size = 0: allowed 1 or more");
  EXPECT_THROW_MESSAGE(static_cast<void>(sliceOf(1, 2, 2)), std::out_of_range, "rank = 2: allowed 0..1");
  EXPECT_THROW_MESSAGE(static_cast<void>(ShardLayout({1}, 4, 2).position(1, 0)), std::out_of_range, "tensor = 1");
}

}  // namespace
}  // namespace torchext::core
