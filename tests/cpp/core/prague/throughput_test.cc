// Gradients per second against all-reduce in a model: 8 workers, groups of 4, a partial all-reduce takes 0.15 of an
// iteration and an all-reduce 0.30, compute times vary by 10 %. The expected ratios are those of the model that the
// project was planned with; another draw of the jitter, or another way to treat the remainder of a division, moves them
// by a few per cent. A band of 8 % around each catches what matters: a straggler that holds up others, or a filter that
// idles.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "simulator.h"

namespace torchext::core::testing {
namespace {

constexpr double kBand = 0.08;
#ifdef TORCHEXT_SANITIZED
constexpr double kDuration = 500;
#else
constexpr double kDuration = 3000;
#endif

SimulationOptions world(GeneratorKind kind, const std::vector<int>& stragglers, double factor, std::int64_t threshold) {
  SimulationOptions options;
  options.generator.world_size = 8;
  options.generator.group_size = 4;
  options.generator.kind = kind;
  options.generator.slowdown_threshold = threshold;
  options.slowdown.assign(8, 1.0);
  for (const int straggler : stragglers) {
    options.slowdown[static_cast<std::size_t>(straggler)] = factor;
  }
  options.duration = kDuration;
  return options;
}

double overAllReduce(const SimulationOptions& options) {
  return simulate(options).gradients_per_time / allReduceGradientsPerTime(options, 0.30);
}

void expectAbout(double expected, double actual) { EXPECT_NEAR(actual, expected, kBand * expected); }

TEST(Throughput, NoStraggler) { expectAbout(1.15, overAllReduce(world(GeneratorKind::kDivision, {}, 1, 0))); }

TEST(Throughput, OneWorkerTwiceAsSlow) {
  expectAbout(1.30, overAllReduce(world(GeneratorKind::kDivision, {3}, 2, 0)));
  expectAbout(1.75, overAllReduce(world(GeneratorKind::kDivision, {3}, 2, 4)));
}

TEST(Throughput, OneWorkerFiveTimesAsSlow) {
  expectAbout(2.57, overAllReduce(world(GeneratorKind::kDivision, {3}, 5, 0)));
  expectAbout(3.68, overAllReduce(world(GeneratorKind::kDivision, {3}, 5, 4)));
}

// Once it is known to be slow nobody waits for it: of its own two-round division it is in the first round only.
TEST(Throughput, NobodyWaitsForAFilteredWorker) {
  auto options = world(GeneratorKind::kSmart, {3}, 5, 4);
  options.generator.host_of = {0, 0, 0, 0, 1, 1, 1, 1};
  const double filtered = simulate(options).waited_for[3];
  // Until it is known: a start-up cost of a few steps for each of the seven others; then less than a hundredth of one.
  EXPECT_LT(filtered, 60.0 + 7 * 0.01 * kDuration);
  options.generator.slowdown_threshold = 0;
  EXPECT_GT(simulate(options).waited_for[3], kDuration);
}

// Two rounds a division must not undo the filter: the straggler is not in the second one.
TEST(Throughput, SmartOverTwoHostsKeepsTheGainOfTheFilter) {
  auto options = world(GeneratorKind::kSmart, {3}, 5, 4);
  options.generator.host_of = {0, 0, 0, 0, 1, 1, 1, 1};
  EXPECT_GT(overAllReduce(options), 3.4);
}

// Nobody falls behind in requests here, because everybody waits for everybody: only the time waited tells who is slow.
TEST(Throughput, StragglersInLockstepWithAllOthersAreFiltered) {
  auto options = world(GeneratorKind::kSmart, {3, 5}, 5, 4);
  options.generator.host_of = {0, 0, 0, 0, 1, 1, 1, 1};
  EXPECT_GT(overAllReduce(options), 3.2);
  auto everybody = world(GeneratorKind::kDivision, {3}, 5, 4);
  everybody.generator.group_size = 8;
  EXPECT_GT(overAllReduce(everybody), 3.2);
}

// Waits of equal workers fade instead of adding up: nobody is filtered, everybody keeps meeting everybody.
TEST(Throughput, TheFilterLeavesEqualWorkersAlone) {
  const auto result = simulate(world(GeneratorKind::kDivision, {}, 1, 4));
  EXPECT_EQ(std::accumulate(result.lone.begin(), result.lone.end(), std::int64_t{0}), 0);
  expectAbout(1.15, overAllReduce(world(GeneratorKind::kDivision, {}, 1, 4)));
}

// In the order cta, with averages that take longer than the compute they hide under: nothing can be faster than one
// average after the other. Equal workers must not come to wait for those who have just begun another one, nor drift
// apart by chance until they filter each other.
TEST(Throughput, OverlappedAveragesFollowOneAnotherClosely) {
  for (const int group_size : {2, 4}) {
    for (const double jitter : {0.03, 0.2}) {
      auto options = world(GeneratorKind::kSmart, {}, 1, 4);
      options.generator.group_size = group_size;
      options.jitter = jitter;
      options.overlapped = true;
      options.reduce_time = 1.1;
      options.ends_apart = 0.05;
      const auto result = simulate(options);
      EXPECT_GT(result.gradients_per_time / 8, 0.94 / 1.1) << group_size << " " << jitter;
      EXPECT_EQ(std::accumulate(result.lone.begin(), result.lone.end(), std::int64_t{0}), 0);
      const double expected = static_cast<double>(result.iterations[0]) * (group_size - 1) / 7;
      for (std::size_t a = 0; a < 8; ++a) {
        for (std::size_t b = 0; b < a; ++b) {
          EXPECT_NEAR(static_cast<double>(result.meetings[a * 8 + b]), expected, 0.35 * expected) << a << " with " << b;
        }
      }
    }
  }
}

TEST(Throughput, AStragglerDoesNotHoldUpOverlappedAverages) {
  auto options = world(GeneratorKind::kSmart, {3}, 5, 4);
  options.overlapped = true;
  options.reduce_time = 1.1;
  const double filtered = simulate(options).gradients_per_time / 8;
  EXPECT_GT(filtered, 0.9 * (7 / 1.1 + 1.0 / 5) / 8);
  options.generator.slowdown_threshold = 0;
  EXPECT_LT(simulate(options).gradients_per_time / 8, 0.7 * filtered);
}

TEST(Throughput, TwoStragglersDoNotMakeOthersWaitForEachOther) {
  EXPECT_GT(overAllReduce(world(GeneratorKind::kDivision, {3, 5}, 5, 4)), 3.2);
}

// The filter keeps the straggler out of others' divisions, not out of training: it still averages in its own.
TEST(Throughput, TheStragglerStillMeetsTheOthers) {
  const auto result = simulate(world(GeneratorKind::kDivision, {3}, 5, 4));
  const double ideal = kDuration / 5.15;
  EXPECT_GT(static_cast<double>(result.iterations[3]), 0.8 * ideal);
  EXPECT_LT(static_cast<double>(result.lone[3]), 0.25 * static_cast<double>(result.iterations[3]));
}

TEST(Throughput, ReadySetWaitsForNoStraggler) {
  EXPECT_GT(overAllReduce(world(GeneratorKind::kReadySet, {}, 1, 0)), 1.08);
  EXPECT_GT(overAllReduce(world(GeneratorKind::kReadySet, {3}, 2, 0)), 1.45);
  EXPECT_GT(overAllReduce(world(GeneratorKind::kReadySet, {3}, 5, 0)), 3.1);
}

// Locks cost concurrency (the paper's reason for the group buffer), but no worker may starve.
TEST(Throughput, RandomTreatsEqualWorkersAlike) {
  const auto result = simulate(world(GeneratorKind::kRandom, {}, 1, 0));
  const auto [low, high] = std::minmax_element(result.iterations.begin(), result.iterations.end());
  EXPECT_GT(static_cast<double>(*low), 0.8 * static_cast<double>(*high));
}

// Update isolation: in a division everybody meets everybody about equally often.
TEST(Throughput, EverybodyMeetsEverybody) {
  const auto result = simulate(world(GeneratorKind::kDivision, {}, 1, 0));
  const double expected = static_cast<double>(result.iterations[0]) * 3 / 7;
  for (std::size_t a = 0; a < 8; ++a) {
    for (std::size_t b = 0; b < a; ++b) {
      EXPECT_NEAR(static_cast<double>(result.meetings[a * 8 + b]), expected, 0.25 * expected) << a << " with " << b;
    }
  }
}

}  // namespace
}  // namespace torchext::core::testing
