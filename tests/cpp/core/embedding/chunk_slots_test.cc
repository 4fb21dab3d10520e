#include "core/embedding/chunk_slots.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "core/base/random.h"
#include "tests/cpp/core/base/expect_throw.h"

namespace torchext::core {
namespace {

using Slots = std::vector<std::int32_t>;

TEST(ChunkSlots, TakesTheShortestRunThatFits) {
  const Slots taken{3, 6};  // free: 0-2, 4-5, 7-9
  ChunkSlots slots(10, taken);
  EXPECT_EQ(slots.runs(), 3U);
  EXPECT_EQ(slots.free(), 8);
  EXPECT_EQ(slots.allocate(2), (Slots{4, 5}));
  EXPECT_EQ(slots.allocate(2), (Slots{0, 1}));
  EXPECT_FALSE(slots.hasRun(4));
  EXPECT_EQ(slots.allocate(4), (Slots{7, 8, 9, 2}));  // in pieces, the longest first
  EXPECT_EQ(slots.free(), 0);
}

TEST(ChunkSlots, NeighboursMerge) {
  Slots all(6);
  std::iota(all.begin(), all.end(), 0);
  ChunkSlots slots(6, all);
  slots.release(1);
  slots.release(3);
  EXPECT_EQ(slots.runs(), 2U);
  slots.release(2);
  EXPECT_EQ(slots.runs(), 1U);
  EXPECT_TRUE(slots.hasRun(3));
  EXPECT_EQ(slots.allocate(2), (Slots{1, 2}));
  EXPECT_FALSE(slots.hasRun(2));
}

TEST(ChunkSlots, MisuseIsNamed) {
  const Slots twice{1, 1};
  const Slots outside{4};
  EXPECT_THROW_MESSAGE(ChunkSlots(4, twice), std::logic_error, "slot 1 is taken twice");
  EXPECT_THROW_MESSAGE(ChunkSlots(4, outside), std::out_of_range, "slot = 4: allowed 0..3");
  EXPECT_THROW_MESSAGE(ChunkSlots(-1, {}), std::invalid_argument, "slots of the pool = -1");
  ChunkSlots slots(4, {});
  EXPECT_THROW_MESSAGE(slots.release(2), std::logic_error, "slot 2 is released, but was free");
  EXPECT_THROW_MESSAGE(slots.release(4), std::out_of_range, "slot = 4");
  EXPECT_THROW_MESSAGE(slots.allocate(5), std::logic_error, "5 asked for, 4 of 4 are free");
  EXPECT_EQ(slots.free(), 4);
}

TEST(ChunkSlots, ALongRunGoesPieceByPiece) {
  const std::vector<std::uint8_t> used(100'000);
  ChunkSlots slots(used);
  for (std::int32_t slot = 0; slot < slots.count(); ++slot) {
    ASSERT_EQ(slots.allocate(1), Slots{slot});
    ASSERT_EQ(slots.runs(), slot + 1 < slots.count() ? 1U : 0U);
  }
}

TEST(ChunkSlotsFuzz, AgreesWithABitmap) {
#ifdef TORCHEXT_SANITIZED
  constexpr int kOperations = 20'000;
#else
  constexpr int kOperations = 300'000;
#endif
  Random random(5);
  constexpr std::int32_t kCount = 200;
  ChunkSlots slots(kCount, {});
  std::vector<bool> free(kCount, true);
  for (int i = 0; i < kOperations; ++i) {
    const auto slot = static_cast<std::int32_t>(random.below(kCount));
    const auto at = static_cast<std::size_t>(slot);
    ASSERT_EQ(slots.isFree(slot), free[at]);
    if (!free[at]) {
      slots.release(slot);
      free[at] = true;
    } else {
      const auto n = std::min(slots.free(), static_cast<std::int32_t>(random.below(6)));
      // The model's answer: the shortest run of n or more, the first of those.
      std::int32_t best = -1;
      std::int32_t best_length = kCount + 1;
      std::int32_t runs = 0;
      for (std::int32_t start = 0; start < kCount;) {
        std::int32_t end = start;
        while (end < kCount && free[static_cast<std::size_t>(end)]) {
          ++end;
        }
        runs += end > start ? 1 : 0;
        if (n > 0 && end - start >= n && end - start < best_length) {
          best = start;
          best_length = end - start;
        }
        start = std::max(end, start + 1);
      }
      ASSERT_EQ(slots.runs(), static_cast<std::size_t>(runs));
      ASSERT_EQ(slots.hasRun(std::max(n, 1)), n > 0 ? best >= 0 : runs > 0);
      const Slots got = slots.allocate(n);
      ASSERT_EQ(got.size(), static_cast<std::size_t>(n));
      for (std::size_t k = 0; k < got.size(); ++k) {
        ASSERT_TRUE(free[static_cast<std::size_t>(got[k])]);
        free[static_cast<std::size_t>(got[k])] = false;
        if (best >= 0) {
          ASSERT_EQ(got[k], best + static_cast<std::int32_t>(k));
        }
      }
    }
    ASSERT_EQ(slots.free(), std::count(free.begin(), free.end(), true));
  }
}

}  // namespace
}  // namespace torchext::core
