// The parts of the embedding bag's passes that need neither torch nor a table.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "kernels/cpu/bag_batch.h"
#include "kernels/cpu/bag_loops.h"

namespace torchext::cpu {
namespace {

TEST(GroupedIds, AreInTheOrderOfAStableSort) {
  std::mt19937 random(1);
  for (const std::int64_t rows : {1, 2, 1000, 2048, 2049, 5'000'000, 2'000'000'000}) {
    BagBatch batch;
    std::uniform_int_distribution<std::uint32_t> id(0,
                                                    static_cast<std::uint32_t>(std::min<std::int64_t>(rows, 300)) - 1);
    for (int i = 0; i < 2000; ++i) {
      // A few ids far apart, so that every digit of the sort counts.
      const auto spread = static_cast<std::uint32_t>(rows / std::min<std::int64_t>(rows, 300));
      batch.ids.push_back(id(random) * spread);
    }
    batch.offsets = {0, 700, 1990};  // the last ten ids belong to no bag
    batch.padding = batch.ids[5];
    const GroupedIds grouped = groupIds(batch, rows);
    std::vector<std::uint32_t> positions;
    for (std::uint32_t p = 0; p < 1990; ++p) {
      if (static_cast<std::int64_t>(batch.ids[p]) != batch.padding) {
        positions.push_back(p);
      }
    }
    std::stable_sort(positions.begin(), positions.end(), [&](auto a, auto b) { return batch.ids[a] < batch.ids[b]; });
    ASSERT_EQ(grouped.entries.size(), positions.size()) << rows;
    std::size_t group = 0;
    for (std::size_t i = 0; i < positions.size(); ++i) {
      ASSERT_EQ(static_cast<std::uint32_t>(grouped.entries[i]), positions[i]) << rows;
      if (i == 0 || batch.ids[positions[i]] != batch.ids[positions[i - 1]]) {
        ASSERT_EQ(grouped.starts[group], i);
        ASSERT_EQ(grouped.idOf(group), batch.ids[positions[i]]);
        ++group;
      }
    }
    EXPECT_EQ(grouped.groups(), group);
    EXPECT_EQ(grouped.starts[group], positions.size());
  }
}

TEST(GroupedIds, NothingIsNoGroup) {
  BagBatch batch;
  batch.offsets = {0};
  EXPECT_EQ(groupIds(batch, 10).groups(), 0U);
}

TEST(BagBatch, CountsLeaveOutPadding) {
  BagBatch batch;
  batch.ids = {1, 2, 2, 3, 2};
  batch.offsets = {0, 3, 3, 4, 5};
  batch.padding = 2;
  EXPECT_EQ(batch.inverseCounts(), (std::vector<double>{1, 0, 1, 0}));
  batch.padding = -1;
  EXPECT_EQ(batch.inverseCounts(), (std::vector<double>{1.0 / 3, 0, 1, 1}));
}

TEST(BagLoops, RunsAreStretchesOfNeighbours) {
  const std::vector<std::int32_t> slots{4, 5, -1, 6, 7, 9, -1};
  std::vector<std::vector<int>> runs;
  forEachRun(slots.data(), 7, [&](int c, std::int32_t slot, int n) { runs.push_back({c, slot, n}); });
  EXPECT_EQ(runs, (std::vector<std::vector<int>>{{0, 4, 2}, {3, 6, 2}, {5, 9, 1}}));
}

TEST(BagLoops, DotOfAnyLength) {
  for (std::size_t n = 0; n < 40; ++n) {
    std::vector<double> a(n);
    std::vector<double> b(n);
    double expected = 0;
    for (std::size_t i = 0; i < n; ++i) {
      a[i] = static_cast<double>(i) + 1;
      b[i] = static_cast<double>(i % 7) - 3;
      expected += a[i] * b[i];
    }
    EXPECT_EQ(dot(a.data(), b.data(), n), expected);
  }
}

}  // namespace
}  // namespace torchext::cpu
