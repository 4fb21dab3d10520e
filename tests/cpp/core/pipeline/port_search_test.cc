#include "core/pipeline/port_search.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>

#include "core/pipeline/pipeline_orders.h"
#include "core/pipeline/stage_partition.h"
#include "tests/cpp/core/pipeline/pipeline_cases.h"

namespace torchext::core::testing {
namespace {

// Activations of one byte.
std::vector<PipelineLayer> sendingLayers(Random& random, int count) {
  std::vector<double> forward;
  for (int i = 0; i < count; ++i) {
    forward.push_back(1 + random.below(4));
  }
  auto layers = layersOf(forward);
  for (PipelineLayer& layer : layers) {
    layer.output_bytes = 1;
  }
  return layers;
}

PipelineLink sharedLink(double latency, double byte_seconds) {
  return {CostTable::line(latency, byte_seconds), {}, true};
}

double playedAsTorch(const std::vector<StageTimes>& stages, const PipelineTable& table) {
  const bool gpipe = table == gpipeTable(static_cast<int>(table.size()), checkTable(table));
  return simulateTable(stages, table, gpipe ? PipelineMode::kClass : PipelineMode::kTorch).seconds;
}

// Visits all depths of 1..microbatches that never rise.
void forEachDepths(int stages, int microbatches, const std::function<void(const Ints&)>& visit) {
  Ints depths(index(stages), 1);
  while (true) {
    if (std::ranges::is_sorted(depths, std::ranges::greater())) {
      visit(depths);
    }
    std::size_t j = 0;
    while (j < depths.size() && depths[j] == microbatches) {
      depths[j++] = 1;
    }
    if (j == depths.size()) {
      return;
    }
    ++depths[j];
  }
}

double leastOfAll(const std::vector<PipelineLayer>& layers, const PipelineLink& link, const PipelineOptions& options) {
  double least = std::numeric_limits<double>::infinity();
  forEachPartition(static_cast<int>(layers.size()), options.world_size, [&](const StageSizes& sizes) {
    const auto stages = stageTimes(layers, link, options, sizes);
    forEachDepths(options.world_size, options.microbatches, [&](const Ints& depths) {
      least = std::min(least, playedAsTorch(stages, depthTable(depths, options.microbatches)));
    });
  });
  return least;
}

TEST(PortSearch, NearTheBestOfAll) {
  Random random(21);
  const int rounds = kPipelineRounds / 20;
  double sum = 0;
  double worst = 1;
  for (int round = 0; round < rounds; ++round) {
    const auto layers = sendingLayers(random, 6);
    const PipelineLink link = sharedLink(0.25, 1 + random.below(6));
    const PipelineOptions options = optionsOf(2 + round % 2, 4);
    const PlannedPipeline plan = planPipeline(layers, link, options);
    const double ratio = plan.seconds / leastOfAll(layers, link, options);
    EXPECT_GE(ratio, 1 - 1e-12);
    sum += ratio;
    worst = std::max(worst, ratio);
  }
  EXPECT_LT(sum / rounds, 1.01);
  EXPECT_LT(worst, 1.08);
}

// The plan of independent links is where it starts.
TEST(PortSearch, NeverSlowerThanThePlanOfIndependentLinks) {
  Random random(22);
  for (int round = 0; round < kPipelineRounds / 10; ++round) {
    const int count = 2 + static_cast<int>(random.below(3));
    const auto layers = sendingLayers(random, 10);
    const PipelineLink link = sharedLink(random.uniform(), 1 + random.below(6));
    PipelineOptions options = optionsOf(count, 6, round % 2 == 0 ? OrderFamily::k1F1B : OrderFamily::kZeroBubble);
    options.memory_bytes = round % 3 == 0 ? std::optional<double>(12 + random.below(20)) : std::nullopt;
    const PlannedPipeline plan = planPipeline(layers, link, options);
    const auto stages = stageTimes(layers, link, options, sizesOf(plan));
    EXPECT_EQ(plan.seconds, playedAsTorch(stages, plan.table));
    EXPECT_EQ(mostInFlight(plan.table), depthsOf(plan));
    for (const PlannedStage& stage : plan.stages) {
      EXPECT_LE(stage.peak_bytes, options.memory_bytes.value_or(1e9));
    }
    PipelineLink alone = link;
    alone.shared_ports = false;
    const PlannedPipeline ideal = planPipeline(layers, alone, options);
    EXPECT_LE(plan.seconds,
              1.01 * playedAsTorch(stageTimes(layers, link, options, sizesOf(ideal)), ideal.table) + 1e-9);
    EXPECT_EQ(planPipeline(layers, link, options).table, plan.table);
  }
}

TEST(PortSearch, AlternativesAndFrontierAreOfTheSameSimulator) {
  Random random(23);
  const auto layers = sendingLayers(random, 12);
  const PipelineLink link = sharedLink(0.5, 4);
  PipelineOptions options = optionsOf(4, 8);
  options.frontier_points = 6;
  options.schedules = {OrderFamily::k1F1B, OrderFamily::kGPipe, OrderFamily::kZeroBubble};
  const PlannedPipeline plan = planPipeline(layers, link, options);
  const auto even = std::ranges::find(plan.alternatives, "4 stages, even 1f1b", &PipelineAlternative::name);
  ASSERT_NE(even, plan.alternatives.end());
  const auto stages = stageTimes(layers, link, options, {3, 3, 3, 3});
  EXPECT_EQ(even->seconds, simulateTable(stages, depthTable({4, 3, 2, 1}, 8), PipelineMode::kClass).seconds);
  EXPECT_EQ(std::ranges::count(plan.alternatives, "the plan", &PipelineAlternative::reason), 1);
  for (std::size_t i = 1; i < plan.frontier.size(); ++i) {
    EXPECT_GT(plan.frontier[i].memory_bytes, plan.frontier[i - 1].memory_bytes);
    EXPECT_LT(plan.frontier[i].seconds, plan.frontier[i - 1].seconds);
  }
}

}  // namespace
}  // namespace torchext::core::testing
