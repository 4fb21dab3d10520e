// How much faster than standard Hop's modes are in the event model: 8 workers, ring-based graph, a message takes a
// tenth of an iteration. What the real backend is to be compared with.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <numeric>

#include "core/base/check.h"
#include "hop_simulator.h"

namespace torchext::core::testing {
namespace {

constexpr int kWorkers = 8;

struct Speed {
  double fastest;  // iterations that the fastest worker gets through per time, skipped ones included
  double total;    // gradients of all per time
};

Speed speed(const HopMode& mode, const HopSimulationOptions& slowdown) {
  static const auto graph = CommunicationGraph::builtIn(GraphKind::kRingBased, kWorkers);
  validateHopMode(mode, graph);
  HopSimulationOptions options = slowdown;
  options.mode = mode;
  options.duration = 20000;
  const auto result = simulateHop(graph, gapBounds(mode, graph), options);
  EXPECT_EQ(result.violation, "");
  const auto fastest = *std::max_element(result.reached.begin(), result.reached.end());
  const auto total = std::accumulate(result.computed.begin(), result.computed.end(), std::int64_t{0});
  return {static_cast<double>(fastest) / result.time, static_cast<double>(total) / result.time};
}

HopSimulationOptions randomSlowdown() { return {.random_slowdown = 6, .slowdown_probability = 1.0 / kWorkers}; }

HopSimulationOptions oneSlowWorker() {
  HopSimulationOptions options;
  options.slowdown.assign(kWorkers, 1.0);
  options.slowdown[0] = 4.0;
  return options;
}

// Prints both figures: a worker that skips contributes fewer gradients.
double ratio(const char* name, const HopMode& mode, const HopSimulationOptions& slowdown) {
  const Speed standard = speed({}, slowdown);
  const Speed other = speed(mode, slowdown);
  std::printf("  %-44s fastest worker %.3f, total gradients %.3f of standard\n", name, other.fastest / standard.fastest,
              other.total / standard.total);
  return other.fastest / standard.fastest;
}

// Within 0.02 of the expected ratios; a jump's skipped iterations count as reached.
TEST(HopSpeed, RandomSlowdown) {
  const auto slowdown = randomSlowdown();
  EXPECT_NEAR(ratio("random x6: standard + tokens, max_ig 4", {.max_iteration_gap = 4}, slowdown), 1.00, 0.001);
  const double notify_ack = ratio("random x6: notify-ack", {.notify_ack = true}, slowdown);
  EXPECT_LT(notify_ack, 0.99);  // the older protocol waits more
  EXPECT_GT(notify_ack, 0.8);
  EXPECT_NEAR(ratio("random x6: backup 1, max_ig 4", {.max_iteration_gap = 4, .backup_workers = 1}, slowdown), 1.27,
              0.02);
  EXPECT_NEAR(ratio("random x6: staleness 5, max_ig 8", {.max_iteration_gap = 8, .staleness = 5}, slowdown), 1.45,
              0.02);
  EXPECT_NEAR(ratio("random x6: backup 1, skip <= 10, max_ig 5",
                    {.max_iteration_gap = 5, .backup_workers = 1, .max_jump = 10}, slowdown),
              1.45, 0.02);
}

// Backup workers and staleness only delay the wait for a worker that is always slow: what they gain is the head start,
// and so depends on how long one looks (1.01 and 1.03 are of a shorter run than this one, which approaches 1).
TEST(HopSpeed, OneWorkerFourTimesSlower) {
  const auto slowdown = oneSlowWorker();
  EXPECT_NEAR(ratio("one x4: backup 1, max_ig 4", {.max_iteration_gap = 4, .backup_workers = 1}, slowdown), 1.01, 0.02);
  EXPECT_NEAR(ratio("one x4: staleness 5, max_ig 8", {.max_iteration_gap = 8, .staleness = 5}, slowdown), 1.03, 0.03);
  EXPECT_NEAR(ratio("one x4: backup 1, skip <= 2, max_ig 5",
                    {.max_iteration_gap = 5, .backup_workers = 1, .max_jump = 2}, slowdown),
              2.0, 0.02);
  EXPECT_NEAR(ratio("one x4: backup 1, skip <= 10, max_ig 5",
                    {.max_iteration_gap = 5, .backup_workers = 1, .max_jump = 10}, slowdown),
              4.0, 0.04);
}

}  // namespace
}  // namespace torchext::core::testing
