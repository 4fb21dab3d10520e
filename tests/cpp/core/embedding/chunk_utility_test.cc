#include "core/embedding/chunk_utility.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "core/base/random.h"
#include "tests/cpp/core/base/expect_throw.h"

namespace torchext::core {
namespace {

constexpr std::int32_t kAbsent = ChunkIndex::kAbsent;

TEST(UtilityCode, EveryCodeReturnsToItself) {
  EXPECT_EQ(UtilityCode::decode(0), 0.0F);
  EXPECT_EQ(UtilityCode::decode(96), 1.0F);
  for (int code = 0; code < 256; ++code) {
    const float value = UtilityCode::decode(static_cast<std::uint8_t>(code));
    EXPECT_EQ(UtilityCode::encode(value, 0xFFFFFFFFU), code);
    EXPECT_EQ(UtilityCode::encode(value, 0), code);
    if (code > 0) {
      EXPECT_NEAR(std::log2(value), (code - 96) / 4.0, 1e-6);
    }
  }
  EXPECT_EQ(UtilityCode::encode(-1.0F, 0), 0);
  EXPECT_EQ(UtilityCode::encode(std::numeric_limits<float>::quiet_NaN(), 0), 0);
  EXPECT_EQ(UtilityCode::encode(1e30F, 0), 255);
}

TEST(UtilityCode, RoundingKeepsTheMean) {
  Random random(1);
  for (const float value : {1.1F, 3e-5F, 777.0F, 0.0F, 3e-8F, 5e-8F}) {
    double sum = 0;
    constexpr int kDraws = 200'000;
    for (int i = 0; i < kDraws; ++i) {
      sum += UtilityCode::decode(UtilityCode::encode(value, static_cast<std::uint32_t>(random.next())));
    }
    EXPECT_NEAR(sum / kDraws, value, 0.005 * value) << value;
  }
}

TEST(ChunkUtility, BytesFollowFloatsThoughEveryStepIsSmall) {
  std::vector<float> values(64);
  std::vector<std::uint8_t> codes(64);
  ChunkUtility exact = ChunkUtility::floats(values);
  ChunkUtility coded = ChunkUtility::bytes(codes);
  double mean = 0;
  for (std::uint64_t step = 0; step < 20'000; ++step) {
    for (std::int64_t key = 0; key < 64; ++key) {
      exact.add(key, kAbsent, 0.001F, step);
      coded.add(key, kAbsent, 0.001F, step);
    }
  }
  for (std::int64_t key = 0; key < 64; ++key) {
    EXPECT_NEAR(coded.get(key, kAbsent) / exact.get(key, kAbsent), 1, 0.8);
    mean += coded.get(key, kAbsent) / exact.get(key, kAbsent) / 64;
  }
  EXPECT_NEAR(mean, 1, 0.1);
}

TEST(ChunkUtility, BytesTellScaledGradientsApartUpToTheLargestFactor) {
  // What a chunk holds after many steps of gradients of 2 and 16, multiplied by 2^16: 100 times as much.
  std::vector<std::uint8_t> codes(2);
  ChunkUtility utility = ChunkUtility::bytes(codes);
  const float factor = 0x1.0p12F;
  ASSERT_FALSE(utility.mustRenormalise(double{factor}));
  utility.add(0, kAbsent, 100 * 2 * 0x1.0p16F * factor, 1);
  utility.add(1, kAbsent, 100 * 16 * 0x1.0p16F * factor, 1);
  EXPECT_NEAR(utility.get(1, kAbsent) / utility.get(0, kAbsent), 8, 2);
}

TEST(ChunkUtility, GrowingFactorIsDecay) {
  // The definition: u <- 0.99 u + x each step, beside what is stored over the factor.
  for (const bool bytes : {false, true}) {
    std::vector<float> values(2);
    std::vector<std::uint8_t> codes(2);
    ChunkUtility utility = bytes ? ChunkUtility::bytes(codes) : ChunkUtility::floats(values);
    double expected[2] = {0, 0};
    double factor = 1;
    int renormalised = 0;
    for (std::uint64_t step = 0; step < 9000; ++step) {
      if (utility.mustRenormalise(factor)) {
        const double after = utility.renormalise(factor);
        EXPECT_GE(after, 1);
        EXPECT_LT(after, 2);
        factor = after;
        ++renormalised;
      }
      for (std::int64_t key = 0; key < 2; ++key) {
        const auto wave = static_cast<double>((step * 7 + static_cast<std::uint64_t>(key) * 3) % 11);
        const double amount = wave * (key == 0 ? 1.0 : 0.01);
        expected[key] = 0.99 * expected[key] + amount;
        utility.add(key, kAbsent, static_cast<float>(amount * factor), step);
        const double got = utility.get(key, kAbsent) / factor;
        if (!bytes) {
          ASSERT_NEAR(got, expected[key], 1e-4 * expected[key]) << step;
        }
      }
      factor /= 0.99;
    }
    for (std::int64_t key = 0; key < 2; ++key) {
      EXPECT_NEAR(utility.get(key, kAbsent) / (factor * 0.99) / expected[key], 1, bytes ? 0.6 : 1e-4);
    }
    EXPECT_EQ(renormalised, bytes ? 10 : 2);
  }
}

TEST(ChunkUtility, WhatIsNoUtilityAddsNothing) {
  std::vector<float> values(1, 2.0F);
  ChunkUtility utility = ChunkUtility::floats(values);
  for (const float amount :
       {-1.0F, 0.0F, std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    utility.add(0, 0, amount, 1);
  }
  EXPECT_EQ(values[0], 2.0F);
  ChunkUtility::none().add(1'000'000, 5, 1.0F, 1);  // touches no memory
  EXPECT_EQ(ChunkUtility::none().get(3, 4), 0.0F);
}

TEST(ChunkUtility, SketchNeverCreditsAnotherChunk) {
  constexpr std::size_t kSlots = 4;
  constexpr std::size_t kCells = 16;
  std::vector<std::uint8_t> codes(kSlots + kCells);
  std::vector<std::int32_t> keys(kCells, -1);
  ChunkUtility utility = ChunkUtility::sketch(codes, keys);
  Random random(3);
  for (std::uint64_t step = 0; step < 20'000; ++step) {
    utility.add(random.below(2) == 0 ? 5 : static_cast<std::int64_t>(random.below(400)), kAbsent, 1.0F, step);
  }
  // The one that takes half of all accesses is found, though 25 keys share its cell.
  EXPECT_GT(utility.get(5, kAbsent), 2000.0F);
  EXPECT_EQ(utility.get(4'000'000, kAbsent), 0.0F);  // never used
  std::size_t visited = 0;
  utility.forEachCell([&](std::int64_t key, float value) {
    ++visited;
    EXPECT_EQ(value, utility.get(key, kAbsent));
    EXPECT_LT(key, 400);
  });
  EXPECT_LE(visited, kCells);
}

TEST(ChunkUtility, SketchTakesChunksInAndOut) {
  std::vector<std::uint8_t> codes(2 + 8);
  std::vector<std::int32_t> keys(8, -1);
  ChunkUtility utility = ChunkUtility::sketch(codes, keys);
  utility.add(77, kAbsent, 8.0F, 0);
  utility.forget(77);
  EXPECT_EQ(utility.get(77, kAbsent), 0.0F);
  utility.admitted(1, 8.0F);
  EXPECT_EQ(utility.get(77, 1), 8.0F);
  utility.moved(1, 0);
  EXPECT_EQ(utility.get(77, 0), 8.0F);
  EXPECT_EQ(codes[1], 0);
  utility.dropped(77, 0);
  EXPECT_EQ(utility.get(77, kAbsent), 8.0F);
  EXPECT_EQ(codes[0], 0);
  EXPECT_THROW_MESSAGE(ChunkUtility::sketch(codes, {}), std::invalid_argument, "cells of the sketch = 0");
}

}  // namespace
}  // namespace torchext::core
