#include "core/pipeline/depth_search.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "core/pipeline/pipeline_orders.h"
#include "core/pipeline/pipeline_simulator.h"
#include "core/pipeline/zero_bubble_search.h"
#include "tests/cpp/core/pipeline/all_schedules.h"
#include "tests/cpp/core/pipeline/pipeline_cases.h"

namespace torchext::core::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The least over all depths that never rise and keep the limits.
double enumerated(DepthSimulator& simulator, const std::vector<StageTimes>& stages, const Ints& limits, Ints& depths) {
  if (depths.size() == stages.size()) {
    return simulator.seconds(stages, depths);
  }
  double best = kInfinity;
  const int most = std::min({simulator.microbatches(), limits[depths.size()], depths.empty() ? 1000 : depths.back()});
  for (int depth = 1; depth <= most; ++depth) {
    depths.push_back(depth);
    best = std::min(best, enumerated(simulator, stages, limits, depths));
    depths.pop_back();
  }
  return best;
}

Ints randomLimits(Random& random, int stages, int microbatches) {
  Ints limits;
  for (int j = 0; j < stages; ++j) {
    limits.push_back(1 + static_cast<int>(random.below(static_cast<unsigned>(microbatches))));
  }
  return limits;
}

TEST(DepthSearch, IsEqualToEnumeration) {
  Random random(10);
  int deep_ends = 0;
  for (int round = 0; round < kPipelineRounds * 3 / 5; ++round) {
    const int count = 2 + static_cast<int>(random.below(4));
    const int microbatches = 2 + static_cast<int>(random.below(count < 5 ? 8 : 4));
    const auto stages = randomStages(random, count);
    const Ints limits = round % 2 == 0 ? Ints(index(count), microbatches) : randomLimits(random, count, microbatches);
    DepthSearch search(microbatches);
    const DepthChoice found = search.best(stages, limits);
    DepthSimulator simulator(microbatches);
    Ints depths;
    EXPECT_EQ(found.seconds, enumerated(simulator, stages, limits, depths)) << "round " << round;
    EXPECT_EQ(found.seconds, simulator.seconds(stages, found.depths));
    checkDepths(found.depths, microbatches);
    for (std::size_t j = 0; j < found.depths.size(); ++j) {
      EXPECT_LE(found.depths[j], limits[j]);
    }
    deep_ends += found.depths.back() > 1 ? 1 : 0;
  }
  EXPECT_EQ(deep_ends, 0);
}

TEST(DepthSearch, EvenSplitsOfTheDesign) {
  struct Known {
    int stages, microbatches;
    double transfer, strict, deep;
    Ints depths;
  };
  for (const Known& known : std::vector<Known>{{4, 8, 0, 396, 396, {4, 3, 2, 1}},
                                               {4, 8, 1, 412, 402, {5, 4, 3, 1}},
                                               {4, 8, 4, 460, 420, {5, 4, 3, 1}},
                                               {4, 16, 4, 796, 708, {6, 5, 3, 1}},
                                               {8, 16, 2, 494, 442, {11, 10, 9, 8, 6, 5, 3, 1}}}) {
    const auto stages = stagesOf(std::vector<double>(index(known.stages), 48.0 / known.stages), known.transfer);
    DepthSearch search(known.microbatches);
    EXPECT_EQ(search.seconds(stages, classDepths(known.stages, known.microbatches)), known.strict);
    const DepthChoice found = search.best(stages, Ints(index(known.stages), known.microbatches));
    EXPECT_EQ(found.seconds, known.deep);
    EXPECT_EQ(found.depths, known.depths);
  }
}

TEST(DepthSearch, NothingFits) {
  DepthSearch search(4);
  EXPECT_TRUE(search.best(stagesOf({1, 1}, 0), {2, 0}).depths.empty());
  EXPECT_TRUE(search.near(stagesOf({1, 1}, 0), {0, 2}, kInfinity).depths.empty());
  EXPECT_TRUE(search.near(stagesOf({1, 1}, 0), {4, 4}, 1).depths.empty());
  EXPECT_EQ(search.near(stagesOf({1, 1}, 0), {4, 4}, kInfinity).seconds, 15);
}

// Against every in-order schedule under the same limits: never below, seldom above, and then by little.
TEST(DepthSearch, BesideAllSchedules) {
  Random random(11);
  int optimal = 0;
  double sum = 0;
  for (int round = 0; round < kPipelineRounds; ++round) {
    const int count = 2 + static_cast<int>(random.below(3));
    const int microbatches = 2 + static_cast<int>(random.below(count == 4 ? 2 : 3));
    const auto stages = randomStages(random, count);
    const Ints limits = randomLimits(random, count, microbatches);
    DepthSearch search(microbatches);
    const double found = search.best(stages, limits).seconds;
    const double best = fastestSchedule(stages, microbatches, limits, false, leastSeconds(stages, microbatches, false));
    EXPECT_GE(found, best);
    EXPECT_LE(found, best * 1.25) << "round " << round;
    optimal += found == best ? 1 : 0;
    sum += found / best;
  }
  EXPECT_GE(optimal, kPipelineRounds * 9 / 10);
  EXPECT_LE(sum / kPipelineRounds, 1.005);
}

// Four micro-batches on four stages: 38,416 schedules a case without limits.
TEST(DepthSearch, BesideAllSchedulesOfFourStages) {
  Random random(12);
  for (int round = 0; round < kPipelineRounds / 50; ++round) {
    const auto stages = randomStages(random, 4);
    const Ints limits{4, 4, 3, 2};
    DepthSearch search(4);
    const double found = search.best(stages, limits).seconds;
    const double best = fastestSchedule(stages, 4, limits, false, leastSeconds(stages, 4, false));
    EXPECT_GE(found, best);
    EXPECT_LE(found, best * 1.05);
  }
}

double scheduled(int stages, int microbatches, int limit) {
  const auto times = stagesOf(std::vector<double>(index(stages), 1.0), 0);
  return ZeroBubbleScheduler(microbatches).schedule(times, Ints(index(stages), limit));
}

TEST(ZeroBubble, KnownSteps) {
  struct Known {
    int stages, microbatches;
    double order_1f1b, tight, loose;
  };
  for (const Known& known : std::vector<Known>{{2, 3, 12, 11, 10},
                                               {2, 4, 15, 13, 13},
                                               {3, 3, 15, 11, 11},
                                               {4, 8, 33, 29, 27},
                                               {4, 16, 57, 53, 51},
                                               {8, 16, 69, 57, 55}}) {
    const auto times = stagesOf(std::vector<double>(index(known.stages), 1.0), 0);
    EXPECT_EQ(DepthSimulator(known.microbatches).seconds(times, classDepths(known.stages, known.microbatches)),
              known.order_1f1b);
    EXPECT_EQ(scheduled(known.stages, known.microbatches, known.stages), known.tight);
    EXPECT_EQ(scheduled(known.stages, known.microbatches, 2 * known.stages - 1), known.loose);
  }
}

TEST(ZeroBubble, KnownOptima) {
  const auto two = stagesOf({1, 1}, 0);
  EXPECT_EQ(fastestSchedule(two, 3, {2, 2}, true), 10);  // the greedy one takes 11
  EXPECT_EQ(fastestSchedule(two, 3, {3, 3}, true), 10);
  EXPECT_EQ(fastestSchedule(two, 4, {2, 2}, true, 13), 13);
  EXPECT_EQ(fastestSchedule(two, 4, {3, 3}, true, 13), 13);
  EXPECT_EQ(fastestSchedule(stagesOf({1, 1, 1}, 0), 3, {3, 3, 3}, true, 11), 11);
  EXPECT_GE(leastSeconds(two, 4, true), 13);
  EXPECT_GE(leastSeconds(stagesOf({1, 1, 1}, 0), 3, true), 11);
}

TEST(ZeroBubble, EvenSplitsOfTheDesign) {
  struct Known {
    int stages, microbatches;
    double transfer, tight, loose;
  };
  for (const Known& known : std::vector<Known>{
           {4, 8, 0, 348, 324}, {4, 8, 1, 368, 327}, {4, 8, 4, 392, 336}, {4, 16, 4, 696, 624}, {8, 16, 2, 404, 344}}) {
    const auto stages = stagesOf(std::vector<double>(index(known.stages), 48.0 / known.stages), known.transfer);
    ZeroBubbleScheduler scheduler(known.microbatches);
    EXPECT_EQ(scheduler.schedule(stages, Ints(index(known.stages), known.stages)), known.tight);
    EXPECT_EQ(scheduler.schedule(stages, Ints(index(known.stages), 2 * known.stages - 1)), known.loose);
  }
}

// Its table keeps the limits and takes what it says, and no schedule of the brute force is slower than it by much.
TEST(ZeroBubble, BesideAllSchedules) {
  Random random(13);
  const int rounds = kPipelineRounds / 2;
  int optimal = 0;
  double sum = 0;
  for (int round = 0; round < rounds; ++round) {
    const int count = 2;
    const int microbatches = 2 + static_cast<int>(random.below(2));
    const auto stages = randomStages(random, count);
    const Ints limits = randomLimits(random, count, microbatches);
    const double least = leastSeconds(stages, microbatches, true);
    const double best = fastestSchedule(stages, microbatches, limits, true, least);
    ZeroBubbleSearch search(microbatches, 0);
    const ZeroBubbleChoice found = search.best(stages, limits);
    const PipelineTable table = search.table(stages, found.limits);
    EXPECT_EQ(simulateTable(stages, table, PipelineMode::kIdeal).seconds, found.seconds);
    EXPECT_EQ(mostInFlight(table), found.depths);
    EXPECT_TRUE(std::ranges::equal(found.depths, limits, std::ranges::less_equal()));
    EXPECT_GE(best, least);
    EXPECT_GE(found.seconds, best);
    EXPECT_LE(found.seconds, best * 1.3) << "round " << round;
    optimal += found.seconds == best ? 1 : 0;
    sum += found.seconds / best;
  }
  EXPECT_GE(optimal, rounds * 7 / 10);
  EXPECT_LE(sum / rounds, 1.03);
}

}  // namespace
}  // namespace torchext::core::testing
