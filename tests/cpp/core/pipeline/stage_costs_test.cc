#include "core/pipeline/stage_costs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "core/pipeline/stage_partition.h"
#include "tests/cpp/core/base/expect_throw.h"
#include "tests/cpp/core/pipeline/pipeline_cases.h"

namespace torchext::core::testing {
namespace {

// Layers of forward 1, 2, 3, input gradient 10, 20, 30 and weight gradient 100, 200, 300.
std::vector<PipelineLayer> threeLayers() {
  std::vector<PipelineLayer> layers;
  for (const int i : {1, 2, 3}) {
    const auto size = index(i);
    layers.push_back({1.0 * i, 10.0 * i, 100.0 * i, 7 * size, 5 * size, 1000 * size});
  }
  return layers;
}

TEST(StageCosts, Times) {
  const auto layers = threeLayers();
  const PipelineLink link{CostTable::line(2, 0.1), {}};
  const StageCosts costs(layers, link, {0.5, 4, true, 1});
  const StageTimes times = costs.times(0, 1, false);
  EXPECT_EQ(times.forward_seconds, 3.5);
  EXPECT_EQ(times.backward_input_seconds, 30.5);
  EXPECT_EQ(times.backward_weight_seconds, 300.5);
  EXPECT_EQ(times.backward_seconds, 330.5);
  EXPECT_EQ(times.transfer_seconds, 3);
  EXPECT_EQ(costs.times(1, 2, false).transfer_seconds, 0);
  EXPECT_EQ(costs.times(0, 1, true).backward_seconds, 333.5);
}

// Torch's stage 0 makes no gradient of its input: I is nothing, and W does the rest.
TEST(StageCosts, FirstStageWithoutInputGradient) {
  const auto layers = threeLayers();
  const PipelineLink link;
  const StageCosts costs(layers, link, {0.5, 4, false, 1});
  const StageTimes first = costs.times(0, 1, false);
  EXPECT_EQ(first.backward_input_seconds, 0);
  EXPECT_EQ(first.backward_weight_seconds, 320.5);
  EXPECT_EQ(first.backward_seconds, 320.5);
  const StageTimes second = costs.times(2, 2, false);
  EXPECT_EQ(second.backward_input_seconds, 30.5);
  EXPECT_EQ(second.backward_seconds, 330.5);
}

TEST(StageCosts, Memory) {
  const auto layers = threeLayers();
  const PipelineLink link;
  const StageCosts costs(layers, link, {0, 4, true, 1});
  EXPECT_EQ(costs.staticBytes(0, 1), 12000);
  EXPECT_EQ(costs.keptBytes(0, 1, false), 21);
  EXPECT_EQ(costs.keptBytes(0, 1, true), 10);
  EXPECT_EQ(costs.peakBytes(0, 1, false, 3), 12063);
  EXPECT_EQ(costs.peakBytes(0, 1, true, 3), 12051);
  EXPECT_EQ(costs.depthLimit(0, 1, false, 12063, 8), 3);
  EXPECT_EQ(costs.depthLimit(0, 1, false, 12062, 8), 2);
  EXPECT_EQ(costs.depthLimit(0, 1, false, 12000, 8), 0);
  EXPECT_EQ(costs.depthLimit(0, 1, false, 11999, 8), 0);
  EXPECT_EQ(costs.depthLimit(0, 1, false, 1e9, 8), 8);
  EXPECT_EQ(costs.depthLimit(0, 1, true, 12051, 8), 3);
  EXPECT_EQ(costs.depthLimit(0, 1, false, std::numeric_limits<double>::infinity(), 8), 8);
}

// The last layer's gradient is ready first. One bucket: 0 hidden of 31; two: the first one is hidden.
TEST(StageCosts, SyncIsExposedAfterTheBackward) {
  const std::vector<PipelineLayer> layers{{1, 0, 10, 0, 0, 10}, {1, 0, 10, 0, 0, 0}, {1, 0, 10, 0, 0, 20}};
  const PipelineLink link{CostTable::line(0, 0), {{2, CostTable::line(1, 1)}}};
  const StageCosts costs(layers, link, {0, 4, true, 2});
  const StageSync& sync = costs.sync(0, 2, false);
  EXPECT_EQ(sync.bucket_ends, (Ints{1, 3}));
  EXPECT_EQ(sync.exposed_seconds, 12);  // the first bucket ends at 31, the second at 42
  EXPECT_EQ(costs.times(0, 2, false).sync_seconds, 12);
  EXPECT_EQ(costs.sync(0, 0, false).bucket_ends, (Ints{1}));
  EXPECT_EQ(costs.sync(0, 0, false).exposed_seconds, 11);
  EXPECT_TRUE(costs.sync(1, 1, false).bucket_ends.empty());
  EXPECT_EQ(costs.sync(1, 1, false).exposed_seconds, 0);
  const StageCosts alone(layers, link, {0, 4, true, 1});
  EXPECT_TRUE(alone.sync(0, 2, false).bucket_ends.empty());
  EXPECT_EQ(alone.times(0, 2, false).sync_seconds, 0);
}

TEST(StageCosts, SyncAfterWeightGradientsAlone) {
  const std::vector<PipelineLayer> layers{{1, 100, 1, 0, 0, 10}, {1, 100, 1, 0, 0, 10}};
  const PipelineLink link{CostTable::line(0, 0), {{2, CostTable::line(0, 1)}}};
  const StageCosts costs(layers, link, {0, 4, true, 2});
  EXPECT_EQ(costs.times(0, 1, false).sync_seconds, 10);       // the first bucket is under the other layer's backward
  EXPECT_EQ(costs.times(0, 1, true).split_sync_seconds, 20);  // nothing leaves before the last W
  // The first stage takes its whole backward as W, by autograd's engine, whose hooks DDP sees.
  const StageCosts as_torch(layers, link, {0, 4, false, 2});
  EXPECT_EQ(as_torch.times(0, 1, true).split_sync_seconds, 19);  // the first layer's W hides one second
}

TEST(StageCosts, BadInput) {
  const PipelineLink link;
  EXPECT_THROW_MESSAGE(StageCosts({}, link, {}), std::invalid_argument, "number of layers = 0");
  auto layers = threeLayers();
  layers[2].backward_input_seconds = -1;
  EXPECT_THROW_MESSAGE(StageCosts(layers, link, {}), std::invalid_argument, "backward_input_seconds = -1");
  layers[2].backward_input_seconds = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THROW_MESSAGE(StageCosts(layers, link, {}), std::invalid_argument, "it is of layer 2");
  layers = threeLayers();
  EXPECT_THROW_MESSAGE(StageCosts(layers, link, {-1, 4, true, 1}), std::invalid_argument, "overhead_seconds = -1");
  EXPECT_THROW_MESSAGE(StageCosts(layers, link, {0, -4, true, 1}), std::invalid_argument, "state_factor = -4");
  EXPECT_THROW_MESSAGE(StageCosts(layers, link, {0, 4, true, 2}), std::invalid_argument, "data width = 2");
  const PipelineLink bad{CostTable::line(0, 0), {{1, CostTable::line(0, 0)}}};
  EXPECT_THROW_MESSAGE(StageCosts(layers, bad, {}), std::invalid_argument, "data width of an all-reduce table = 1");
}

TEST(StagePartition, AllOfThemOnce) {
  std::vector<StageSizes> all;
  forEachPartition(5, 3, [&](const StageSizes& sizes) { all.push_back(sizes); });
  EXPECT_EQ(all, (std::vector<StageSizes>{{1, 1, 3}, {1, 2, 2}, {1, 3, 1}, {2, 1, 2}, {2, 2, 1}, {3, 1, 1}}));
  for (const auto& [layers, stages] : std::vector<std::pair<int, int>>{{1, 1}, {6, 1}, {6, 6}, {9, 4}, {12, 5}}) {
    int count = 0;
    forEachPartition(layers, stages, [&](const StageSizes& sizes) {
      ++count;
      EXPECT_EQ(sizes.size(), index(stages));
    });
    EXPECT_EQ(count, partitionCount(layers, stages));
  }
  EXPECT_EQ(partitionCount(48, 4), 16215);
  EXPECT_NEAR(partitionCount(96, 8) / 1.007e10, 1, 0.1);
}

TEST(StagePartition, LeastMaximumIsThatOfAll) {
  Random random(14);
  for (int round = 0; round < 100; ++round) {
    const int layers = 3 + static_cast<int>(random.below(6));
    const int stages = 1 + static_cast<int>(random.below(3));
    std::vector<double> costs;
    for (int i = 0; i < layers; ++i) {
      costs.push_back(1 + random.below(9));
    }
    const auto cost = [&](int stage, int first, int last) {
      double sum = 0;
      for (int i = first; i <= last; ++i) {
        sum += costs[index(i)];
      }
      return sum * (stage + 1);
    };
    const auto largest = [&](const StageSizes& sizes) {
      double most = 0;
      int first = 0;
      for (int j = 0; j < stages; ++j) {
        most = std::max(most, cost(j, first, first + sizes[index(j)] - 1));
        first += sizes[index(j)];
      }
      return most;
    };
    double least = std::numeric_limits<double>::infinity();
    forEachPartition(layers, stages, [&](const StageSizes& sizes) { least = std::min(least, largest(sizes)); });
    EXPECT_EQ(largest(leastMaximum(layers, stages, cost)), least);
  }
}

TEST(StagePartition, SharesAndSeeds) {
  EXPECT_EQ(sharedPartition(std::vector<double>(8, 1.0), {1, 1, 1}), (StageSizes{3, 2, 3}));
  EXPECT_EQ(sharedPartition(std::vector<double>(8, 1.0), {1, 1}), (StageSizes{4, 4}));
  EXPECT_EQ(sharedPartition({9, 1, 1, 1}, {1, 1, 1}), (StageSizes{1, 1, 2}));
  EXPECT_EQ(sharedPartition({0, 0, 0}, {1, 1, 1}), (StageSizes{1, 1, 1}));
  const auto layers = layersOf(std::vector<double>(48, 1.0));
  const PipelineLink link;
  const StageCosts costs(layers, link, {0, 4, true, 1});
  const auto seeds = seedPartitions(costs, 4, 8, false);
  EXPECT_EQ(seeds.front(), (StageSizes{12, 12, 12, 12}));
  for (const StageSizes& seed : seeds) {
    EXPECT_EQ(seed.size(), 4U);
  }
  // 1, 7/8, 49/64 and 343/512 of the first.
  EXPECT_NE(std::ranges::find(seeds, StageSizes{14, 13, 11, 10}), seeds.end());
}

}  // namespace
}  // namespace torchext::core::testing
