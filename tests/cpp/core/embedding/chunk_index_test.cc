#include "core/embedding/chunk_index.h"

#include <gtest/gtest.h>

#include <array>
#include <map>
#include <vector>

#include "core/base/random.h"
#include "tests/cpp/core/base/expect_throw.h"

namespace torchext::core {
namespace {

#ifdef TORCHEXT_SANITIZED
constexpr int kFuzzOperations = 400'000;
#else
constexpr int kFuzzOperations = 10'000'000;
#endif

TEST(ChunkIndex, IdentityHoldsEverything) {
  ChunkIndex index = ChunkIndex::identity(5, 4);
  EXPECT_EQ(index.keys(), 20);
  EXPECT_EQ(index.find(13), 13);
  std::array<std::int32_t, 4> slots{};
  EXPECT_EQ(index.findRow(3, slots.data()), 4);
  EXPECT_EQ(slots, (std::array<std::int32_t, 4>{12, 13, 14, 15}));
  EXPECT_THROW_MESSAGE(index.insert(1, 1), std::logic_error, "holds every chunk");
  EXPECT_THROW_MESSAGE(index.erase(1), std::logic_error, "may not leave");
}

TEST(ChunkIndex, SizesAreChecked) {
  std::vector<std::int32_t> cells(11, ChunkIndex::kAbsent);
  EXPECT_THROW_MESSAGE(ChunkIndex::direct(cells, 3, 4), std::invalid_argument, "= 11: allowed 12");
  EXPECT_THROW_MESSAGE(ChunkIndex::identity(3, 0), std::invalid_argument, "chunks of a row = 0: allowed 1..256");
  EXPECT_THROW_MESSAGE(ChunkIndex::identity(3, 257), std::invalid_argument, "= 257");
  EXPECT_THROW_MESSAGE(ChunkIndex::identity(-1, 4), std::invalid_argument, "rows = -1");
  EXPECT_THROW_MESSAGE(ChunkIndex::identity(std::int64_t{1} << 30, 4), std::invalid_argument, "larger chunk_dim");
  EXPECT_THROW_MESSAGE(ChunkIndex::hashed({}, 3, 4), std::invalid_argument, "cells of the hashed index = 0");
}

TEST(ChunkIndex, BytesOfTheHash) {
  // 8-byte cells at load 0.7: 11.43 bytes a resident chunk.
  const double bytes = 8.0 * static_cast<double>(ChunkIndex::cellsFor(1'000'000)) / 1e6;
  EXPECT_NEAR(bytes, 8 / 0.7, 0.001);
}

TEST(ChunkIndex, MisuseIsNamed) {
  std::vector<std::int64_t> cells(4, ChunkIndex::kEmpty);
  ChunkIndex index = ChunkIndex::hashed(cells, 100, 2);
  index.insert(7, 0);
  EXPECT_THROW_MESSAGE(index.insert(7, 1), std::logic_error, "key 7 is resident already, in slot 0");
  EXPECT_THROW_MESSAGE(index.erase(8), std::logic_error, "key 8 is not resident");
  index.insert(20, 1);
  index.insert(30, 2);
  EXPECT_THROW_MESSAGE(index.insert(40, 3), std::logic_error, "hash of 4 cells is full");
  EXPECT_EQ(index.find(40), ChunkIndex::kAbsent);  // and the walk ends
}

// Random insertions, erasures and look-ups against a plain array, with few slots and a full hash, so that walks are
// long and wrap around.
void fuzz(ChunkIndex index, std::int64_t rows, int chunks, int slots, std::uint64_t seed) {
  Random random(seed);
  const auto keys = static_cast<std::uint32_t>(rows * chunks);
  std::vector<std::int32_t> model(keys, ChunkIndex::kAbsent);
  std::vector<std::uint32_t> resident;
  std::vector<std::int32_t> free;
  for (int slot = 0; slot < slots; ++slot) {
    free.push_back(slot);
  }
  std::vector<std::int32_t> row(static_cast<std::size_t>(chunks));
  for (int i = 0; i < kFuzzOperations; ++i) {
    const std::uint64_t bits = random.next();
    const auto key = static_cast<std::uint32_t>((bits >> 32U) * keys >> 32U);
    if ((bits & 3U) == 0 && !resident.empty()) {
      const std::size_t at = (bits >> 2U) % resident.size();
      const std::uint32_t victim = resident[at];
      ASSERT_EQ(index.erase(victim), model[victim]);
      free.push_back(model[victim]);
      model[victim] = ChunkIndex::kAbsent;
      resident[at] = resident.back();
      resident.pop_back();
    } else if ((bits & 1U) != 0 && model[key] == ChunkIndex::kAbsent && !free.empty()) {
      index.insert(key, free.back());
      model[key] = free.back();
      free.pop_back();
      resident.push_back(key);
    } else if ((bits & 15U) == 2) {
      const std::uint32_t first = key / static_cast<std::uint32_t>(chunks) * static_cast<std::uint32_t>(chunks);
      int expected = 0;
      const int found = index.findRow(first / static_cast<std::uint32_t>(chunks), row.data());
      for (int c = 0; c < chunks; ++c) {
        ASSERT_EQ(row[static_cast<std::size_t>(c)], model[first + static_cast<std::uint32_t>(c)]);
        expected += model[first + static_cast<std::uint32_t>(c)] >= 0 ? 1 : 0;
      }
      ASSERT_EQ(found, expected);
    } else {
      ASSERT_EQ(index.find(key), model[key]) << "operation " << i;
    }
  }
  std::map<std::int64_t, std::int32_t> all;
  index.forEach([&](std::int64_t key, std::int32_t slot) { EXPECT_TRUE(all.emplace(key, slot).second); });
  EXPECT_EQ(all.size(), resident.size());
  for (const auto& [key, slot] : all) {
    EXPECT_EQ(model[static_cast<std::size_t>(key)], slot);
  }
}

TEST(ChunkIndexFuzz, Direct) {
  std::vector<std::int32_t> cells(500 * 4, ChunkIndex::kAbsent);
  fuzz(ChunkIndex::direct(cells, 500, 4), 500, 4, 300, 1);
}

TEST(ChunkIndexFuzz, HashAtItsLoad) {
  std::vector<std::int64_t> cells(ChunkIndex::cellsFor(700), ChunkIndex::kEmpty);
  fuzz(ChunkIndex::hashed(cells, 1000, 4), 1000, 4, 700, 2);
}

TEST(ChunkIndexFuzz, HashNearlyFull) {
  std::vector<std::int64_t> cells(62, ChunkIndex::kEmpty);
  fuzz(ChunkIndex::hashed(cells, 40, 8), 40, 8, 60, 3);
}

}  // namespace
}  // namespace torchext::core
