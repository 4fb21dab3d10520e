#include "core/pipeline/pipeline_simulator.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <stdexcept>

#include "core/pipeline/depth_search.h"
#include "core/pipeline/pipeline_orders.h"
#include "tests/cpp/core/base/expect_throw.h"
#include "tests/cpp/core/pipeline/pipeline_cases.h"

namespace torchext::core::testing {
namespace {

double played(const std::vector<StageTimes>& stages, const PipelineTable& table,
              PipelineMode mode = PipelineMode::kIdeal) {
  return simulateTable(stages, table, mode).seconds;
}

PipelineTable strict1F1B(std::size_t stages, int microbatches) {
  return depthTable(classDepths(static_cast<int>(stages), microbatches), microbatches);
}

struct KnownStep {
  std::vector<double> forward;
  int microbatches;
  double order_1f1b, order_1f1b_transfer, gpipe, gpipe_transfer;
};

// The table of the design; backward twice the forward, without transfers and with transfers of 1.
TEST(PipelineSimulator, KnownSteps) {
  const std::vector<KnownStep> known{
      {{1, 1}, 2, 9, 11, 9, 11},      {{2, 1}, 4, 25, 28, 27, 29},    {{1, 2}, 4, 27, 29, 27, 29},
      {{1, 2, 3}, 4, 45, 49, 45, 49}, {{3, 2, 1}, 4, 39, 45, 45, 49}, {{2, 2, 2, 2}, 8, 66, 82, 66, 72},
  };
  for (const KnownStep& step : known) {
    const PipelineTable one = strict1F1B(step.forward.size(), step.microbatches);
    const PipelineTable gpipe = gpipeTable(static_cast<int>(step.forward.size()), step.microbatches);
    EXPECT_EQ(played(stagesOf(step.forward, 0), one), step.order_1f1b);
    EXPECT_EQ(played(stagesOf(step.forward, 1), one), step.order_1f1b_transfer);
    EXPECT_EQ(played(stagesOf(step.forward, 0), gpipe), step.gpipe);
    EXPECT_EQ(played(stagesOf(step.forward, 1), gpipe), step.gpipe_transfer);
    EXPECT_EQ(simulateTable(stagesOf(step.forward, 0), one, PipelineMode::kIdeal).most_in_flight,
              classDepths(static_cast<int>(step.forward.size()), step.microbatches));
  }
}

TEST(PipelineSimulator, TorchsClassWaitsForItsSends) {
  const auto stages = stagesOf({2, 2, 2, 2}, 1);
  EXPECT_EQ(played(stages, strict1F1B(4, 8), PipelineMode::kClass), 85);
  EXPECT_EQ(played(stagesOf({2, 2, 2, 2}, 0), strict1F1B(4, 8), PipelineMode::kClass), 66);
  EXPECT_GE(played(stages, gpipeTable(4, 8), PipelineMode::kClass), 72);
  EXPECT_THROW_MESSAGE(played(stages, depthTable({5, 4, 3, 1}, 8), PipelineMode::kClass), std::invalid_argument,
                       "Schedule1F1B");
}

// Two stages, computed by hand: the class sends F1 only once B0's gradient is expected, and then waits for both.
TEST(PipelineSimulator, ClassByHand) {
  EXPECT_EQ(played(stagesOf({1, 1}, 1), strict1F1B(2, 2), PipelineMode::kClass), 12);
}

// The bound of stages that fall by 1 - 1/M is W / (1 - (1 - 1/M)^p), that of even ones is (M + p - 1) W / p. With p = M
// = 4 only the second is reached: gradients do not come back before stage 0 has run out of forwards.
TEST(PipelineSimulator, BoundsOfFallingAndEvenStages) {
  std::vector<double> forward{1};
  for (int j = 1; j < 4; ++j) {
    forward.push_back(forward.back() * 0.75);
  }
  const auto falling = stagesOf(forward, 0);
  const double work = 3 * (forward[0] + forward[1] + forward[2] + forward[3]);
  EXPECT_NEAR(leastSeconds(falling, 4, false) / work, 1 / (1 - std::pow(0.75, 4)), 1e-12);
  EXPECT_NEAR(leastSeconds(falling, 4, false) / work, 1.463, 5e-4);
  EXPECT_NEAR(DepthSearch(4).best(falling, {4, 4, 4, 4}).seconds / work, 1.737, 5e-4);
  EXPECT_EQ(DepthSimulator(4).seconds(stagesOf({1, 1, 1, 1}, 0), {4, 3, 2, 1}) / 12, 1.75);
}

// The class' waits and torch's receives only ever cost time, and the fast simulator is the slow one.
TEST(PipelineSimulator, ModesAndFastPathAgree) {
  Random random(5);
  for (int round = 0; round < kPipelineRounds; ++round) {
    const int count = 1 + static_cast<int>(random.below(5));
    const int microbatches = 1 + static_cast<int>(random.below(7));
    auto stages = randomStages(random, count);
    for (StageTimes& stage : stages) {
      stage.forward_seconds += random.uniform();
      stage.sync_seconds = random.below(20);
    }
    Ints depths;
    for (int j = 0; j < count; ++j) {
      const int most = depths.empty() ? microbatches : depths.back();
      depths.push_back(1 + static_cast<int>(random.below(static_cast<unsigned>(most))));
    }
    const PipelineTable table = depthTable(depths, microbatches);
    const double ideal = played(stages, table);
    EXPECT_EQ(DepthSimulator(microbatches).seconds(stages, depths), ideal);
    EXPECT_GE(played(stages, table, PipelineMode::kTorch), ideal);
    EXPECT_GE(ideal, leastSeconds(stages, microbatches, false) * (1 - 1e-12));
    const PipelineTable one = strict1F1B(stages.size(), microbatches);
    EXPECT_GE(played(stages, one, PipelineMode::kClass), played(stages, one));
  }
}

TEST(PipelineSimulator, NoOrderIsBelowTheBound) {
  Random random(6);
  for (int round = 0; round < 10 * kPipelineRounds; ++round) {
    const bool split = round % 2 == 1;
    const int count = 1 + static_cast<int>(random.below(4));
    const int microbatches = 1 + static_cast<int>(random.below(5));
    auto stages = randomStages(random, count);
    for (StageTimes& stage : stages) {
      stage.sync_seconds = random.below(20);
      stage.split_sync_seconds = random.below(20);
    }
    const PipelineTable table = randomTable(random, count, microbatches, split);
    EXPECT_GE(played(stages, table), leastSeconds(stages, microbatches, split));
  }
}

TEST(PipelineSimulator, MonotoneInTimesAndTransfers) {
  Random random(7);
  for (int round = 0; round < kPipelineRounds; ++round) {
    const int count = 2 + static_cast<int>(random.below(3));
    const auto stages = randomStages(random, count);
    const PipelineTable table = randomTable(random, count, 1 + static_cast<int>(random.below(5)), round % 2 == 1);
    auto slower = stages;
    StageTimes& stage = slower[random.below(static_cast<unsigned>(count))];
    stage.forward_seconds += random.below(3);
    stage.backward_seconds += random.below(3);
    stage.backward_input_seconds += random.below(3);
    stage.backward_weight_seconds += random.below(3);
    stage.transfer_seconds += random.below(3);
    for (const PipelineMode mode : {PipelineMode::kIdeal, PipelineMode::kTorch}) {
      EXPECT_GE(played(slower, table, mode), played(stages, table, mode));
    }
  }
}

void checkRank(const std::vector<PipelineSpan>& spans, int rank, double end) {
  double free = 0;
  for (const PipelineSpan& span : spans) {
    if (span.rank == rank) {
      EXPECT_GE(span.begin_seconds, free);
      free = span.end_seconds;
    }
  }
  EXPECT_EQ(free, end);
}

TEST(PipelineSimulator, TimelineIsOneThatCanBe) {
  Random random(8);
  for (int round = 0; round < kPipelineRounds / 5; ++round) {
    const int count = 2 + static_cast<int>(random.below(3));
    const int microbatches = 1 + static_cast<int>(random.below(5));
    const auto stages = randomStages(random, count);
    const PipelineTable table = randomTable(random, count, microbatches, round % 2 == 1);
    const PipelineMode mode = round % 3 == 0 ? PipelineMode::kTorch : PipelineMode::kIdeal;
    const PipelineRun run = simulateTable(stages, table, mode, true);
    EXPECT_EQ(run.transfers.size(), index(2 * (count - 1) * microbatches));
    std::map<std::string, PipelineSpan> named;
    double busy = 0;
    for (const PipelineSpan& span : run.spans) {
      named[toString(span.action)] = span;
      busy += span.end_seconds - span.begin_seconds;
    }
    EXPECT_NEAR(run.bubble, 1 - busy / (count * run.seconds), 1e-12);
    for (int rank = 0; rank < count; ++rank) {
      checkRank(run.spans, rank, run.end_seconds[index(rank)]);
    }
    const std::string back = round % 2 == 1 ? "I" : "B";
    for (const PipelineSpan& moved : run.transfers) {
      const bool forward = moved.action.kind == ActionKind::kSendForward;
      const int from = moved.rank;
      const int to = forward ? from + 1 : from - 1;
      const std::string kind = forward ? "F" : back;
      EXPECT_GE(moved.begin_seconds, named.at(concat(from, kind, moved.action.microbatch)).end_seconds);
      EXPECT_GE(named.at(concat(to, kind, moved.action.microbatch)).begin_seconds, moved.end_seconds);
    }
  }
}

TEST(PipelineSimulator, SyncComesAfterTheLastBackward) {
  auto stages = stagesOf({1, 1}, 0);
  stages[1].sync_seconds = 2;  // stage 1 ends 2 before stage 0
  EXPECT_EQ(played(stages, strict1F1B(2, 2)), 9);
  stages[0].sync_seconds = 5;
  stages[1].sync_seconds = 9;
  EXPECT_EQ(played(stages, strict1F1B(2, 2)), 16);
  stages[0].split_sync_seconds = 100;
  EXPECT_GT(played(stages, zeroBubbleClassTable(2, 2)), 100);
}

TEST(PipelineSimulator, DeadlockNamesRankAndAction) {
  PipelineTable table = depthTable({2, 2}, 2);
  std::swap(table[0][1], table[0][2]);  // F0 B0 F1 B1, and stage 1 waits for both forwards
  for (const PipelineMode mode : {PipelineMode::kIdeal, PipelineMode::kTorch}) {
    EXPECT_THROW_MESSAGE(played(stagesOf({1, 1}, 0), table, mode), std::invalid_argument,
                         "deadlock: rank 0 waits for ever at action 1, 0B0");
  }
}

TEST(PipelineSimulator, BadInput) {
  const PipelineTable table = strict1F1B(2, 2);
  EXPECT_THROW_MESSAGE(played(stagesOf({1}, 0), table), std::invalid_argument, "number of ranks of a table = 2");
  EXPECT_THROW_MESSAGE(played({}, table), std::invalid_argument, "number of stages = 0");
  auto stages = stagesOf({1, 1}, 0);
  stages[1].backward_seconds = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THROW_MESSAGE(played(stages, table), std::invalid_argument, "backward_seconds = nan");
  stages[1].backward_seconds = -1;
  EXPECT_THROW_MESSAGE(played(stages, table), std::invalid_argument, "it is of stage 1");
  for (const char* name : {"ideal", "torch", "class"}) {
    EXPECT_STREQ(toString(parsePipelineMode(name)), name);
  }
  EXPECT_THROW_MESSAGE(parsePipelineMode("exact"), std::invalid_argument, "ideal, torch, class");
}

}  // namespace
}  // namespace torchext::core::testing
