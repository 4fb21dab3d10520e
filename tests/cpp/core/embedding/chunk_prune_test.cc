// Selection and pruning against a plain sort and a plain map.
#include "core/embedding/chunk_prune.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <vector>

#include "core/base/random.h"
#include "tests/cpp/core/base/expect_throw.h"

namespace torchext::core {
namespace {

std::vector<ChunkCandidate> randomCandidates(std::size_t n, Random& random, std::uint32_t distinct) {
  std::vector<ChunkCandidate> candidates;
  for (std::size_t i = 0; i < n; ++i) {
    const auto slot = random.below(3) == 0 ? static_cast<std::int32_t>(i) : -1;
    candidates.push_back({static_cast<float>(1 + random.below(distinct)), static_cast<std::int32_t>(i), slot});
  }
  random.shuffle(candidates);
  return candidates;
}

// The definition: sort everything; who is among the first `capacity` is to be resident.
ChunkSelection sorted(std::vector<ChunkCandidate> candidates, const SelectionLimits& limits) {
  std::sort(candidates.begin(), candidates.end(), [&](ChunkCandidate a, ChunkCandidate b) {
    a.utility *= a.slot >= 0 ? 1 + limits.hysteresis : 1;
    b.utility *= b.slot >= 0 ? 1 + limits.hysteresis : 1;
    return isMoreUseful(a, b);
  });
  ChunkSelection all;
  std::size_t residents = 0;
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    const bool in = i < static_cast<std::size_t>(limits.capacity);
    residents += candidates[i].slot >= 0 ? 1U : 0U;
    if (in != (candidates[i].slot >= 0)) {
      (in ? all.admitted : all.dropped).push_back(candidates[i]);
    }
  }
  const auto capacity = static_cast<std::size_t>(limits.capacity);
  const std::size_t most =
      (residents > capacity ? residents - capacity : 0) + static_cast<std::size_t>(limits.max_swaps);
  const std::size_t spared = all.dropped.size() > most ? all.dropped.size() - most : 0;
  all.dropped.erase(all.dropped.begin(), all.dropped.begin() + static_cast<std::ptrdiff_t>(spared));
  all.admitted.resize(std::min(all.admitted.size(), capacity + all.dropped.size() - residents));
  const auto by_key = [](const ChunkCandidate& a, const ChunkCandidate& b) { return a.key < b.key; };
  std::sort(all.dropped.begin(), all.dropped.end(), by_key);
  std::sort(all.admitted.begin(), all.admitted.end(), by_key);
  return all;
}

TEST(ChunkSelection, EqualsASort) {
  Random random(11);
  for (const std::uint32_t distinct : {1U, 3U, 1U << 20U}) {  // all equal, many ties, few
    for (const std::size_t n : {10U, 5000U}) {
      const auto candidates = randomCandidates(n, random, distinct);
      for (const std::size_t capacity : {std::size_t{0}, std::size_t{1}, n / 50, n / 2, n - 1, n, n + 5}) {
        for (const std::size_t swaps : {std::size_t{0}, n / 7, n}) {
          const SelectionLimits limits{static_cast<std::int64_t>(capacity), static_cast<std::int64_t>(swaps), 0.5F};
          const ChunkSelection got = selectChunks(candidates, limits);
          const ChunkSelection expected = sorted(candidates, limits);
          EXPECT_TRUE(got.dropped == expected.dropped && got.admitted == expected.admitted)
              << n << " " << capacity << " " << swaps << " " << distinct;
        }
      }
    }
  }
}

// A selector that was given a band says so when it was wrong, and is exact when it says nothing.
TEST(ChunkSelection, ABandIsRightOrRefused) {
  Random random(12);
  for (const bool swaps_are_outside : {false, true}) {
    int settled = 0;
    for (int trial = 0; trial < 300; ++trial) {
      const auto candidates = randomCandidates(200, random, trial % 2 == 0 ? 5 : 1U << 20U);
      auto ends = std::vector<ChunkCandidate>{candidates[random.below(200)], candidates[random.below(200)]};
      std::sort(ends.begin(), ends.end(), isMoreUseful);
      const std::int64_t most = swaps_are_outside ? random.below(20) : 30;
      const SelectionLimits limits{static_cast<std::int64_t>(random.below(220)), most, 0};
      ChunkSelector selector(limits, {ends[0], ends[1], swaps_are_outside});
      for (const ChunkCandidate& candidate : candidates) {
        selector.offer(candidate.key, candidate.slot, candidate.utility);
      }
      if (selector.settled()) {
        ++settled;
        const ChunkSelection got = selector.finish();
        const ChunkSelection expected = sorted(candidates, limits);
        EXPECT_TRUE(got.dropped == expected.dropped && got.admitted == expected.admitted) << trial;
      }
    }
    EXPECT_GT(settled, 30);
    EXPECT_LT(settled, 270);
  }
}

// What a sample says about a table of 40,000 chunks, of which the first 10,000 are residents.
TEST(ChunkSelection, SwapsAreGuessedWhereMoreWantToThanMay) {
  Random random(14);
  const auto sample = [&](std::uint32_t residents_up_to, std::uint32_t absent_up_to) {
    std::vector<ChunkCandidate> drawn;
    for (int i = 0; i < 8000; ++i) {
      const auto key = static_cast<std::int32_t>(random.below(40'000));
      const bool resident = key < 10'000;
      const std::uint32_t most = resident ? residents_up_to : absent_up_to;
      drawn.push_back({static_cast<float>(random.below(most)), key, resident ? key : -1});
    }
    return drawn;
  };
  const SelectionLimits limits{.capacity = 10'000, .max_swaps = 1000};
  const auto band = guessSwaps(sample(1000, 1000), 40'000, 10'000, limits);
  ASSERT_TRUE(band.has_value());
  EXPECT_TRUE(band->swaps_are_outside);
  EXPECT_GT(band->low.utility, 100);  // 1 of 10 residents is below 100, 1 of 30 absent chunks above 967
  EXPECT_LT(band->low.utility, 200);
  EXPECT_LT(band->high.utility, 967);
  EXPECT_GT(band->high.utility, 900);
  EXPECT_FALSE(guessSwaps(sample(100'000, 1000), 40'000, 10'000, limits).has_value());  // who is in stays
  EXPECT_FALSE(guessSwaps(sample(1000, 1000), 40'000, 10'000, {.capacity = 10'000, .max_swaps = 40'000}).has_value());
  EXPECT_FALSE(guessSwaps(sample(1000, 1000), 40'000, 0, limits).has_value());
  EXPECT_FALSE(guessSwaps({}, 40'000, 10'000, limits).has_value());
}

// Tables large enough for a sample, with utilities that mislead it or do not.
TEST(ChunkPrune, ALargeTableIsSelectedExactly) {
  Random random(13);
  constexpr int kRows = 20'000;
  constexpr int kChunks = 4;
  for (int trial = 0; trial < 6; ++trial) {
    std::vector<std::int32_t> cells(kRows * kChunks, ChunkIndex::kAbsent);
    std::vector<float> values(cells.size());
    ChunkIndex index = ChunkIndex::direct(cells, kRows, kChunks);
    ChunkUtility utility = ChunkUtility::floats(values);
    const std::uint32_t used = trial < 3 ? 1000 : kRows * kChunks;  // few chunks have any utility, or all
    for (std::uint32_t i = 0; i < used; ++i) {
      values[random.below(kRows * kChunks)] += static_cast<float>(1 + random.below(trial % 3 == 0 ? 3 : 1000));
    }
    for (std::int32_t slot = 0; slot < 5000; ++slot) {
      const std::int64_t key = random.below(kRows * kChunks);
      if (index.find(key) == ChunkIndex::kAbsent) {
        index.insert(key, slot);
      }
    }
    const SelectionLimits limits{5000, trial % 2 == 0 ? 300 : 90'000, 0.5F};  // exact for whole numbers
    const ChunkSelection expected = sorted(chunkCandidates(index, utility), limits);
    const ChunkPrune plan = pruneChunks(index, utility, limits);
    EXPECT_TRUE(plan.dropped == expected.dropped) << trial;
    ASSERT_EQ(plan.admitted.size(), expected.admitted.size()) << trial;
    for (std::size_t i = 0; i < plan.admitted.size(); ++i) {
      ASSERT_EQ(plan.admitted[i].key, expected.admitted[i].key) << trial;
    }
  }
}

TEST(ChunkSelection, DropsAndAddsArePaired) {
  // Residents 0..3 with utilities 1..4 fill a pool of 4; absent 10 and 11 are better than three of them.
  const std::vector<ChunkCandidate> candidates{{1, 0, 0}, {2, 1, 1}, {3, 2, 2}, {4, 3, 3}, {3.5F, 10}, {9, 11}};
  const ChunkSelection all = selectChunks(candidates, {.capacity = 4, .max_swaps = 9});
  ASSERT_EQ(all.dropped.size(), 2U);
  EXPECT_EQ(all.dropped[0].key, 0);
  EXPECT_EQ(all.dropped[1].key, 1);
  ASSERT_EQ(all.admitted.size(), 2U);

  const ChunkSelection one = selectChunks(candidates, {.capacity = 4, .max_swaps = 1});
  ASSERT_EQ(one.admitted.size(), 1U);
  EXPECT_EQ(one.admitted[0].key, 11);  // the best enters
  EXPECT_EQ(one.dropped[0].key, 0);    // the worst leaves

  const ChunkSelection none = selectChunks(candidates, {.capacity = 4, .max_swaps = 0});
  EXPECT_TRUE(none.dropped.empty() && none.admitted.empty());

  const ChunkSelection room = selectChunks(candidates, {.capacity = 5, .max_swaps = 0});
  EXPECT_TRUE(room.dropped.empty());
  EXPECT_EQ(room.admitted.size(), 1U);

  const ChunkSelection shrunk = selectChunks(candidates, {.capacity = 2, .max_swaps = 0});
  EXPECT_EQ(shrunk.dropped.size(), 2U);
  EXPECT_TRUE(shrunk.admitted.empty());

  const ChunkSelection sticky = selectChunks(candidates, {.capacity = 4, .max_swaps = 9, .hysteresis = 1});
  ASSERT_EQ(sticky.admitted.size(), 1U);  // 3.5 does not beat 2 twice over: 4, 6, 8 and 9 stay
  EXPECT_EQ(sticky.admitted[0].key, 11);
  EXPECT_EQ(sticky.dropped[0].utility, 1.0F);
}

TEST(ChunkSelection, EqualsStay) {
  const std::vector<ChunkCandidate> candidates{{1, 7}, {1, 9, 0}, {1, 8, 1}, {1, 3}};
  const ChunkSelection result = selectChunks(candidates, {.capacity = 2, .max_swaps = 9});
  EXPECT_TRUE(result.dropped.empty() && result.admitted.empty());
}

TEST(ChunkSelection, LimitsAreChecked) {
  EXPECT_THROW_MESSAGE(selectChunks({}, {.capacity = -1}), std::invalid_argument, "capacity = -1");
  EXPECT_THROW_MESSAGE(selectChunks({}, {.max_swaps = -2}), std::invalid_argument, "max_swaps = -2");
  EXPECT_THROW_MESSAGE(selectChunks({}, {.hysteresis = -0.5F}), std::invalid_argument, "hysteresis = -0.5");
}

TEST(ChunkPrune, RowsStayTogetherWhereThereIsRoom) {
  std::vector<std::int32_t> cells(4 * 4, ChunkIndex::kAbsent);
  std::vector<float> values(16);
  ChunkIndex index = ChunkIndex::direct(cells, 4, 4);
  ChunkUtility utility = ChunkUtility::floats(values);
  index.insert(0, 0);  // row 0, chunk 0
  index.insert(4, 1);  // row 1 stands right behind it
  values[0] = values[4] = 5;
  values[2] = values[3] = 1;
  const ChunkPrune plan = pruneChunks(index, utility, {.capacity = 8, .max_swaps = 8});
  // Row 0 grows to three chunks: it moves into a run of three.
  ASSERT_EQ(plan.moves.size(), 1U);
  EXPECT_EQ(plan.moves[0].from, 0);
  EXPECT_EQ(cells[2], cells[0] + 1);
  EXPECT_EQ(cells[3], cells[0] + 2);
  EXPECT_EQ(plan.moves[0].to, cells[0]);
  EXPECT_EQ(plan.admitted.size(), 2U);
}

// A model that knows values: what each chunk holds must be what it held, whatever moved where.
void fuzz(ChunkIndex index, ChunkUtility& utility, int capacity, std::uint64_t seed) {
#ifdef TORCHEXT_SANITIZED
  constexpr int kRounds = 60;
#else
  constexpr int kRounds = 1000;
#endif
  Random random(seed);
  std::vector<std::int64_t> pool(static_cast<std::size_t>(capacity), -1);
  std::map<std::int64_t, std::int64_t> held;
  std::int64_t next_value = 0;
  std::uint64_t step = 0;
  const int widest = capacity;
  for (int round = 0; round < kRounds; ++round) {
    for (int i = 0; i < 200; ++i, ++step) {
      // Popular keys change over time.
      const auto keys = static_cast<std::uint32_t>(index.keys());
      const std::int64_t key = (random.below(keys / 4) + static_cast<std::uint32_t>(round)) % keys;
      utility.add(key, index.find(key), static_cast<float>(1 + random.below(100)), step);
    }
    capacity = widest - static_cast<int>(random.below(static_cast<std::uint32_t>(widest / 2)));
    const auto swaps = static_cast<std::int64_t>(random.below(20));
    const ChunkPrune plan = pruneChunks(index, utility, {.capacity = capacity, .max_swaps = swaps});
    const std::vector<std::int64_t> before = pool;
    std::set<std::int32_t> targets;
    for (const ChunkMove& move : plan.moves) {
      ASSERT_TRUE(targets.insert(move.to).second);
      pool[static_cast<std::size_t>(move.to)] = pool[static_cast<std::size_t>(move.from)];  // in place
    }
    for (const ChunkCandidate& chunk : plan.dropped) {
      ASSERT_EQ(before[static_cast<std::size_t>(chunk.slot)], held.at(chunk.key));
      held.erase(chunk.key);
    }
    for (const ChunkAdmission& chunk : plan.admitted) {
      ASSERT_TRUE(targets.insert(chunk.slot).second);
      ASSERT_TRUE(held.emplace(chunk.key, next_value).second);
      pool[static_cast<std::size_t>(chunk.slot)] = next_value++;
    }
    ASSERT_LE(held.size(), static_cast<std::size_t>(capacity));  // never over budget
    std::size_t residents = 0;
    std::set<std::int32_t> used;
    index.forEach([&](std::int64_t key, std::int32_t slot) {
      ++residents;
      ASSERT_LT(slot, capacity);
      ASSERT_TRUE(used.insert(slot).second);
      ASSERT_EQ(pool[static_cast<std::size_t>(slot)], held.at(key));
    });
    ASSERT_EQ(residents, held.size());
  }
  EXPECT_GT(next_value, kRounds / 4);
}

TEST(ChunkPruneFuzz, DirectWithFloats) {
  std::vector<std::int32_t> cells(100 * 4, ChunkIndex::kAbsent);
  std::vector<float> values(400);
  ChunkUtility utility = ChunkUtility::floats(values);
  fuzz(ChunkIndex::direct(cells, 100, 4), utility, 50, 1);
}

TEST(ChunkPruneFuzz, HashWithBytes) {
  std::vector<std::int64_t> cells(ChunkIndex::cellsFor(50), ChunkIndex::kEmpty);
  std::vector<std::uint8_t> codes(400);
  ChunkUtility utility = ChunkUtility::bytes(codes);
  fuzz(ChunkIndex::hashed(cells, 50, 8), utility, 50, 2);
}

TEST(ChunkPruneFuzz, HashWithASketch) {
  std::vector<std::int64_t> cells(ChunkIndex::cellsFor(50), ChunkIndex::kEmpty);
  std::vector<std::uint8_t> codes(50 + 40);
  std::vector<std::int32_t> keys(40, -1);
  ChunkUtility utility = ChunkUtility::sketch(codes, keys);
  fuzz(ChunkIndex::hashed(cells, 50, 8), utility, 50, 3);
}

TEST(ChunkPrune, KeysOfAnotherTableAreRefused) {
  std::vector<std::int64_t> cells(ChunkIndex::cellsFor(4), ChunkIndex::kEmpty);
  ChunkIndex::hashed(cells, 10, 2).insert(19, 3);
  const std::vector<std::int64_t> before = cells;
  ChunkIndex index = ChunkIndex::hashed(cells, 9, 2);
  std::vector<std::uint8_t> codes(18);
  ChunkUtility bytes = ChunkUtility::bytes(codes);
  EXPECT_THROW_MESSAGE(pruneChunks(index, bytes, {.capacity = 4}), std::out_of_range, "key is 19: allowed 0..17");
  EXPECT_THROW_MESSAGE(chunkCandidates(index, ChunkUtility::none()), std::out_of_range, "key is 19: allowed 0..17");
  EXPECT_EQ(cells, before);

  std::vector<std::int64_t> none(ChunkIndex::cellsFor(4), ChunkIndex::kEmpty);
  std::vector<std::int32_t> keys(2, -1);
  std::vector<std::uint8_t> more(4 + 2, 1);
  keys[1] = 18;
  ChunkIndex empty = ChunkIndex::hashed(none, 9, 2);
  ChunkUtility sketch = ChunkUtility::sketch(more, keys);
  EXPECT_THROW_MESSAGE(pruneChunks(empty, sketch, {.capacity = 4}), std::out_of_range, "key is 18: allowed 0..17");
}

TEST(ChunkPrune, TheIdentityHasNothingToChoose) {
  ChunkIndex index = ChunkIndex::identity(2, 2);
  ChunkUtility utility = ChunkUtility::none();
  EXPECT_THROW_MESSAGE(pruneChunks(index, utility, {.capacity = 4}), std::invalid_argument, "wholly resident");
}

}  // namespace
}  // namespace torchext::core
