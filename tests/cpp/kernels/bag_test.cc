// The parts of the embedding bag's passes that need no torch.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "kernels/bag_batch.h"
#include "kernels/cpu/bag_groups.h"
#include "kernels/cpu/bag_loops.h"
#include "kernels/cpu/bag_rows.h"

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

// The resident chunks of every row come out in order, whatever the distance at which they were looked up.
TEST(RowChunks, AreTheResidentOnes) {
  constexpr std::int64_t kRows = 50;
  constexpr int kChunks = 3;
  std::mt19937 random(2);
  std::vector<std::int32_t> cells(kRows * kChunks, core::ChunkIndex::kAbsent);
  std::int32_t slots = 0;
  for (std::int32_t& cell : cells) {
    cell = random() % 3 == 0 ? slots++ : core::ChunkIndex::kAbsent;
  }
  std::vector<std::int64_t> hash(core::ChunkIndex::cellsFor(static_cast<std::size_t>(slots)), core::ChunkIndex::kEmpty);
  core::ChunkIndex hashed = core::ChunkIndex::hashed(hash, kRows, kChunks);
  for (std::size_t key = 0; key < cells.size(); ++key) {
    if (cells[key] >= 0) {
      hashed.insert(static_cast<std::int64_t>(key), cells[key]);
    }
  }
  for (const auto& index :
       {core::ChunkIndex::direct(cells, kRows, kChunks), hashed, core::ChunkIndex::identity(kRows, kChunks)}) {
    for (const std::size_t count : {0U, 1U, 31U, 32U, 33U, 64U, 200U}) {
      std::vector<std::uint32_t> rows(count + 7);
      for (std::uint32_t& row : rows) {
        row = static_cast<std::uint32_t>(random() % kRows);
      }
      const auto row_of = [&](std::size_t p) __attribute__((always_inline)) { return rows[p]; };
      std::size_t asked = 0;
      const auto prefetch = [&](std::size_t) __attribute__((always_inline)) { ++asked; };
      RowChunks found(index, 7, count + 7, row_of, prefetch);  // from a position that is not the first
      for (std::size_t p = 7; p < count + 7; ++p) {
        std::vector<std::int32_t> expected(kChunks);
        index.findRow(rows[p], expected.data());
        std::vector<std::int32_t> got(kChunks, core::ChunkIndex::kAbsent);
        std::int32_t before = -1;
        for (const auto [chunk, slot] : found.at(p)) {
          ASSERT_GT(chunk, before);
          before = chunk;
          got[static_cast<std::size_t>(chunk)] = slot;
        }
        ASSERT_EQ(got, expected) << p;
        found.advance(p);
      }
      EXPECT_EQ(asked, count * kChunks);
    }
  }
}

TEST(BagBatch, KnowsTheBagOfEachPosition) {
  BagBatch batch;
  batch.ids = {4, 4, 4, 4};
  batch.offsets = {0, 1, 1, 4};
  const auto bag_of = batch.bagOf();
  EXPECT_EQ(std::vector<std::uint32_t>(bag_of.begin(), bag_of.end()), (std::vector<std::uint32_t>{0, 2, 2, 2}));
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
