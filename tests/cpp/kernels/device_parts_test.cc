// The parts of the embedding bag's CUDA kernels, on the host: look-up, batches, groups of lanes, coded utility.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <set>
#include <vector>

#include "csrc/core/embedding/chunk_index.h"
#include "csrc/core/embedding/chunk_utility.h"
#include "kernels/bag_batch.h"
#include "kernels/cpu/bag_groups.h"
#include "tests/cpp/kernels/host_device.h"

namespace torchext::cuda {
namespace {

TEST(DeviceTable, FindsWhatTheIndexHolds) {
  constexpr std::int64_t kRows = 70;
  constexpr int kChunks = 3;
  std::mt19937 random(1);
  std::vector<std::int32_t> cells(kRows * kChunks, core::ChunkIndex::kAbsent);
  std::vector<std::int64_t> hash(core::ChunkIndex::cellsFor(60), core::ChunkIndex::kEmpty);
  core::ChunkIndex direct = core::ChunkIndex::direct(cells, kRows, kChunks);
  core::ChunkIndex hashed = core::ChunkIndex::hashed(hash, kRows, kChunks);
  TableView direct_view;
  direct_view.layout = core::ChunkIndex::Layout::kDirect;
  direct_view.direct = cells.data();
  TableView hashed_view;
  hashed_view.layout = core::ChunkIndex::Layout::kHashed;
  hashed_view.hashed = hash.data();
  hashed_view.cells = hash.size();
  TableView identity_view;
  for (TableView* view : {&direct_view, &hashed_view, &identity_view}) {
    view->rows = kRows;
    view->chunks = kChunks;
  }
  std::int32_t resident = 0;
  for (int change = 0; change < 2000; ++change) {
    const auto key = static_cast<std::int64_t>(random() % cells.size());
    if (direct.find(key) != core::ChunkIndex::kAbsent) {
      hashed.erase(key);
      direct.erase(key);
      --resident;
    } else if (resident < 60) {
      const auto slot = static_cast<std::int32_t>(random() % 1000);
      direct.insert(key, slot);
      hashed.insert(key, slot);
      ++resident;
    }
    for (int probe = 0; probe < 20; ++probe) {
      const auto row = static_cast<std::int64_t>(random() % kRows);
      const auto chunk = static_cast<int>(random() % kChunks);
      const std::int32_t expected = direct.find(row * kChunks + chunk);
      ASSERT_EQ(direct_view.slotOf(row, chunk), expected);
      ASSERT_EQ(hashed_view.slotOf(row, chunk), expected);
      ASSERT_EQ(identity_view.slotOf(row, chunk), row * kChunks + chunk);
    }
  }
}

TEST(DeviceTable, CutsAChunkIntoQuads) {
  TableView table;
  for (const auto& [width, quads, last] : {std::tuple{4, 1, 4}, {5, 2, 1}, {16, 4, 4}, {130, 33, 2}}) {
    table.chunk_dim = width;
    EXPECT_EQ(table.quadsOfChunk(), quads);
    EXPECT_EQ(table.columns(quads - 1).count, last);
    EXPECT_EQ(table.columns(quads - 1).column, 4 * (quads - 1));
  }
}

TEST(HostGroup, AddsUpInTheOrderOfAButterfly) {
  for (int lanes = 1; lanes <= kMostLanes; lanes *= 2) {
    float values[kMostLanes];
    for (int lane = 0; lane < lanes; ++lane) {
      values[lane] = 1.0F / static_cast<float>(lane + 1);
    }
    // Pairs at a distance of half the lanes, then of a quarter: written as recursion.
    const auto halves = [&](auto&& self, int begin, int stride) -> float {
      return stride == lanes ? values[begin] : self(self, begin, 2 * stride) + self(self, begin + stride, 2 * stride);
    };
    EXPECT_EQ(HostGroup(lanes).all(values, Plus{}), halves(halves, 0, 1)) << lanes;
    EXPECT_EQ(HostGroup(lanes).all(values, Larger{}), 1.0F);
    EXPECT_EQ(HostGroup(lanes).first(values), 1.0F);
  }
}

TEST(HostGroup, HasALaneForAQuadUpToAWarp) {
  EXPECT_EQ(lanesFor(1), 1);
  EXPECT_EQ(lanesFor(3), 4);
  EXPECT_EQ(lanesFor(4), 4);
  EXPECT_EQ(lanesFor(17), 32);
  EXPECT_EQ(lanesFor(1000), 32);
}

TEST(DeviceUtility, DecodesAsTheCore) {
  for (int code = 0; code < 256; ++code) {
    const auto byte = static_cast<std::uint8_t>(code);
    EXPECT_EQ(decodeUtility(byte), core::UtilityCode::decode(byte)) << code;
  }
}

TEST(DeviceUtility, EncodesAsTheCore) {
  std::mt19937 random(2);
  const auto same = [&](float value) {
    for (const std::uint32_t bits : {0U, 0xFFFFFFFFU, static_cast<std::uint32_t>(random())}) {
      ASSERT_EQ(encodeUtility(value, bits), core::UtilityCode::encode(value, bits)) << value << " " << bits;
    }
  };
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (int code = 0; code < 256; ++code) {
    const float value = core::UtilityCode::decode(static_cast<std::uint8_t>(code));
    same(value);
    same(std::nextafter(value, 0.0F));
    same(std::nextafter(value, kInfinity));
  }
  std::uniform_real_distribution<float> exponent(-60, 60);
  for (int i = 0; i < 100'000; ++i) {
    same(std::exp2(exponent(random)));
  }
  for (const float value : {-1.0F, kInfinity, std::numeric_limits<float>::quiet_NaN(), 1e-42F}) {
    same(value);
  }
}

TEST(DeviceUtility, AddsAndRenormalisesAsTheCore) {
  constexpr std::int64_t kKeys = 500;
  std::mt19937 random(3);
  std::vector<float> floats(kKeys);
  std::vector<std::uint8_t> codes(kKeys);
  auto device_floats = floats;
  auto device_codes = codes;
  core::ChunkUtility core_floats = core::ChunkUtility::floats(floats);
  core::ChunkUtility core_codes = core::ChunkUtility::bytes(codes);
  const HostDevice device;
  for (std::uint64_t step = 1; step < 40; ++step) {
    const float factor = std::exp2(static_cast<float>(step) / 3);
    const UtilityView view_of_floats{.floats = device_floats.data(), .factor = factor, .step = step};
    const UtilityView view_of_codes{.codes = device_codes.data(), .factor = factor, .step = step};
    for (int i = 0; i < 100; ++i) {
      const auto key = static_cast<std::int64_t>(random() % kKeys);
      const float amount = i == 0   ? std::numeric_limits<float>::infinity()
                           : i == 1 ? std::numeric_limits<float>::quiet_NaN()
                                    : static_cast<float>(random() % 1000) / 64;
      core_floats.add(key, 0, amount * factor, step);
      core_codes.add(key, 0, amount * factor, step);
      view_of_floats.add(key, 0, amount * factor);
      view_of_codes.add(key, 0, amount * factor);
    }
    ASSERT_EQ(floats, device_floats);
    ASSERT_EQ(codes, device_codes);
    if (step % 10 == 0) {
      EXPECT_EQ(runRenormalise(device, view_of_floats, kKeys, double{factor}), core_floats.renormalise(double{factor}));
      EXPECT_EQ(runRenormalise(device, view_of_codes, kKeys, double{factor}), core_codes.renormalise(double{factor}));
      ASSERT_EQ(floats, device_floats);
      ASSERT_EQ(codes, device_codes);
    }
  }
}

TEST(DeviceUtility, WearsCellsDownAsTheCore) {
  constexpr std::size_t kSlots = 20;
  constexpr std::size_t kCells = 16;  // for 100 keys: most of what comes is another's
  std::mt19937 random(4);
  std::vector<std::uint8_t> codes(kSlots + kCells);
  std::vector<std::int32_t> keys(kCells, -1);
  auto device_codes = codes;
  auto device_keys = keys;
  core::ChunkUtility core = core::ChunkUtility::sketch(codes, keys);
  int taken = 0;
  for (std::uint64_t step = 1; step < 3000; ++step) {
    const UtilityView view{.codes = device_codes.data(),
                           .cell_keys = device_keys.data(),
                           .cell_count = kCells,
                           .slots = kSlots,
                           .step = step};
    const auto key = static_cast<std::int64_t>(random() % 100);
    const auto slot = static_cast<std::int32_t>(key < 20 ? key : -1);
    const float grown = step % 50 == 0 ? std::numeric_limits<float>::infinity() : static_cast<float>(random() % 64) / 8;
    const auto before = keys;
    core.add(key, slot, grown, step);
    if (slot == kAbsent) {
      view.addToCell(view.cellOf(key), key, grown);
    } else {
      view.add(key, slot, grown);
    }
    taken += keys != before ? 1 : 0;
    ASSERT_EQ(codes, device_codes) << step;
    ASSERT_EQ(keys, device_keys) << step;
  }
  EXPECT_GT(taken, 100);
}

BatchView viewOf(const std::vector<std::int64_t>& ids, const std::vector<std::int64_t>& offsets, bool last,
                 std::int64_t rows) {
  BatchView view;
  view.ids64 = ids.data();
  view.positions = static_cast<std::int64_t>(ids.size());
  view.offsets64 = offsets.data();
  view.offset_count = static_cast<std::int64_t>(offsets.size());
  view.bags = view.offset_count - (last ? 1 : 0);
  view.rows = rows;
  return view;
}

TEST(DeviceBatch, SeesWhatIsWrong) {
  const auto wrong = [](const std::vector<std::int64_t>& ids, const std::vector<std::int64_t>& offsets,
                        bool last = false) {
    const BatchView view = viewOf(ids, offsets, last, 10);
    std::int32_t bad = 0;
    HostDevice device;
    runCheck(device, view, &bad);
    return bad != 0;
  };
  const std::vector<std::int64_t> ids{1, 2, 9, 0};
  EXPECT_FALSE(wrong(ids, {0, 2}));
  EXPECT_FALSE(wrong(ids, {0, 2, 2, 4}, true));
  EXPECT_FALSE(wrong(ids, {0, 2}, true));
  EXPECT_FALSE(wrong(ids, {3}, true));  // no bags: the only offset is the end of none
  EXPECT_FALSE(wrong({}, {}));
  EXPECT_FALSE(wrong({}, {0, 0}));
  EXPECT_TRUE(wrong({1, 10}, {0}));
  EXPECT_TRUE(wrong({1, -1}, {0}));
  EXPECT_TRUE(wrong({1, (std::int64_t{1} << 32) + 1}, {0}));
  EXPECT_TRUE(wrong(ids, {1, 2}));
  EXPECT_TRUE(wrong(ids, {0, 5}));
  EXPECT_TRUE(wrong(ids, {0, 3, 2}));
  EXPECT_TRUE(wrong(ids, {0, -1}));
  EXPECT_TRUE(wrong(ids, {5}, true));
  EXPECT_TRUE(wrong(ids, {-1}, true));
}

TEST(DeviceBatch, KnowsTheBagOfEachPosition) {
  std::mt19937 random(4);
  for (int round = 0; round < 200; ++round) {
    const bool last = round % 2 == 0;
    std::vector<std::int64_t> offsets{0};
    for (auto bags = random() % 9; bags > 0; --bags) {
      offsets.push_back(offsets.back() + static_cast<std::int64_t>(random() % 4));
    }
    const std::vector<std::int64_t> ids(static_cast<std::size_t>(offsets.back()) + random() % 3, 1);
    const BatchView view = viewOf(ids, offsets, last, 2);
    for (std::int64_t p = 0; p < view.positions; ++p) {
      std::int32_t expected = -1;
      for (std::int64_t bag = 0; bag < view.bags; ++bag) {
        const bool open = bag + 1 == static_cast<std::int64_t>(offsets.size());
        const std::int64_t end = open ? view.positions : offsets[static_cast<std::size_t>(bag) + 1];
        ASSERT_EQ(view.begin(bag), offsets[static_cast<std::size_t>(bag)]);
        ASSERT_EQ(view.end(bag), end);
        expected = p >= view.begin(bag) && p < end ? static_cast<std::int32_t>(bag) : expected;
      }
      ASSERT_EQ(view.bagOf(p), expected);
    }
  }
  BatchView square;
  square.positions = 12;
  square.bag_size = 3;
  square.bags = 4;
  EXPECT_EQ(square.bagOf(0), 0);
  EXPECT_EQ(square.bagOf(11), 3);
  EXPECT_EQ(square.end(3), 12);
}

TEST(DeviceRuns, AreTheGroupsOfTheCpu) {
  std::mt19937 random(5);
  for (const std::size_t count : {0U, 1U, 127U, 128U, 129U, 1000U}) {
    for (const std::uint32_t rows : {1U, 3U, 5000U}) {
      cpu::BagBatch batch;
      std::vector<std::int64_t> ids;
      for (std::size_t i = 0; i < count; ++i) {
        ids.push_back(random() % rows);
        batch.ids.push_back(static_cast<std::uint32_t>(ids.back()));
      }
      const std::vector<std::int64_t> offsets{0, static_cast<std::int64_t>(count / 2),
                                              static_cast<std::int64_t>(count - count / 4)};
      batch.offsets = offsets;
      batch.padding = static_cast<std::int64_t>(rows / 2);
      BatchView view = viewOf(ids, offsets, true, rows);
      view.padding = batch.padding;
      const cpu::GroupedIds expected = cpu::groupIds(batch, rows);
      const WorkspaceSizes sizes{.positions = view.positions};
      std::vector<std::byte> memory(layOut(nullptr, sizes).bytes);
      const Workspace space = layOut(memory.data(), sizes);
      HostDevice device;
      runGrouping(device, view, space);
      const RunsView runs = space.runs(view);
      std::size_t group = 0;
      for (std::int64_t i = 0; i < runs.count; ++i) {
        if (static_cast<std::size_t>(i) < expected.entries.size()) {
          ASSERT_EQ(std::uint64_t{runs.keys[i]} << 32U | static_cast<std::uint32_t>(runs.order[i]),
                    expected.entries[static_cast<std::size_t>(i)]);
        } else {
          ASSERT_EQ(runs.keys[i], rows);
        }
        if (runs.beginsAt(i)) {
          ASSERT_LT(group, expected.groups());
          ASSERT_EQ(i, expected.starts[group]);
          ASSERT_EQ(runs.endOf(i, runs.count), expected.starts[group + 1]);
          ASSERT_EQ(runs.endOf(i, i + 1), i + 1);
          ++group;
        }
      }
      EXPECT_EQ(group, expected.groups());
    }
  }
}

TEST(Workspace, IsCutIntoPartsThatDoNotOverlap) {
  const WorkspaceSizes sizes{
      .positions = 1000, .bags = 7, .dim = 24, .sketched = 3000, .math_bytes = 8, .sort_bytes = 333};
  const Workspace size = layOut(nullptr, sizes);
  EXPECT_EQ(size.keys, nullptr);
  std::vector<char> memory(size.bytes);
  const Workspace space = layOut(memory.data(), sizes);
  EXPECT_EQ(space.bytes, size.bytes);
  const std::vector<std::pair<const void*, std::size_t>> parts{{space.keys, 4000},
                                                               {space.sorted, 4000},
                                                               {space.positions, 4000},
                                                               {space.order, 4000},
                                                               {space.bag_of, 4000},
                                                               {space.inverse, 56},
                                                               {space.partial, 8 * 24 * 8UL},
                                                               {space.cells, 12000},
                                                               {space.sorted_cells, 12000},
                                                               {space.items, 12000},
                                                               {space.item_order, 12000},
                                                               {space.grown, 12000},
                                                               {space.sort, 333}};
  const char* before = memory.data();
  for (const auto& [begin, bytes] : parts) {
    const auto* at = static_cast<const char*>(begin);
    EXPECT_GE(at, before);
    EXPECT_EQ((at - memory.data()) % 256, 0);
    before = at + bytes;
  }
  EXPECT_LE(before, memory.data() + memory.size());
  EXPECT_EQ(keyBits(0), 1);
  EXPECT_EQ(keyBits(7), 3);
  EXPECT_EQ(keyBits(8), 4);
}

}  // namespace
}  // namespace torchext::cuda
