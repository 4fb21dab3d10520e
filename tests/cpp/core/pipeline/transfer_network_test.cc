#include "core/pipeline/transfer_network.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <stdexcept>
#include <utility>

#include "core/pipeline/pipeline_lowering.h"
#include "core/pipeline/pipeline_orders.h"
#include "core/pipeline/pipeline_simulator.h"
#include "tests/cpp/core/base/expect_throw.h"
#include "tests/cpp/core/pipeline/pipeline_cases.h"

namespace torchext::core::testing {
namespace {

// Transfers take latency + port.
std::vector<StageTimes> sharing(std::vector<StageTimes> stages, double latency, double port) {
  for (std::size_t j = 0; j + 1 < stages.size(); ++j) {
    stages[j].transfer_seconds = latency + port;
    stages[j].port_seconds = port;
  }
  return stages;
}

std::vector<StageTimes> independent(std::vector<StageTimes> stages) {
  for (StageTimes& stage : stages) {
    stage.port_seconds = 0;
  }
  return stages;
}

double played(const std::vector<StageTimes>& stages, const PipelineTable& table,
              PipelineMode mode = PipelineMode::kTorch) {
  return simulateTable(stages, table, mode).seconds;
}

void carryAll(TransferNetwork& network) {
  while (network.advance()) {
  }
}

// Three ranks; a transfer takes 1 and 4 of a port.
class ThreeRanks : public ::testing::Test {
 protected:
  std::vector<StageTimes> stages_ = sharing(stagesOf({1, 1, 1}, 0), 1, 4);
  TransferNetwork network_{stages_, 2, false};
};

TEST_F(ThreeRanks, OnePortSendsOneMessageAtATime) {
  network_.postForward(2, 0);
  network_.postBackward(0, 0);
  network_.sendForward(1, 0, 2);
  network_.sendBackward(1, 0, 3);
  carryAll(network_);
  EXPECT_EQ(network_.forward(1).arrived(0), 7);    // 2 + 4 + 1
  EXPECT_EQ(network_.backward(0).arrived(0), 11);  // the port is free at 6
}

TEST_F(ThreeRanks, OnePortReceivesOneMessageAtATime) {
  network_.postForward(1, 0);
  network_.postBackward(1, 0);
  network_.sendForward(0, 0, 3);
  network_.sendBackward(2, 0, 2);
  carryAll(network_);
  EXPECT_EQ(network_.backward(1).arrived(0), 7);
  EXPECT_EQ(network_.forward(0).arrived(0), 11);
}

TEST_F(ThreeRanks, BothWaysAtOnce) {
  network_.postForward(1, 0);
  network_.postBackward(0, 0);
  network_.sendForward(0, 0, 2);
  network_.sendBackward(1, 0, 2);
  carryAll(network_);
  EXPECT_EQ(network_.forward(0).arrived(0), 7);
  EXPECT_EQ(network_.backward(0).arrived(0), 7);
}

TEST_F(ThreeRanks, AnnouncementsStandBehindHalfOfTheRest) {
  network_.postForward(2, 0);
  network_.sendForward(1, 0, 2);
  network_.sendForward(0, 0, 0);
  network_.postForward(1, 3);  // rank 1 sends until 6: announced at 4.5
  carryAll(network_);
  EXPECT_EQ(network_.forward(0).arrived(0), 9.5);
}

TEST_F(ThreeRanks, ALinkIsFreeOnceItsMessageHasArrived) {
  network_.postForward(1, 0);
  network_.postForward(1, 0);
  network_.sendForward(0, 0, 0);
  network_.sendForward(0, 1, 0);
  carryAll(network_);
  EXPECT_EQ(network_.forward(0).arrived(1), 10);
}

TEST(SharedPorts, IdealLinksAreIndependent) {
  const auto stages = sharing(stagesOf({2, 2, 2, 2}, 0), 0, 1);
  EXPECT_EQ(played(stages, depthTable({4, 3, 2, 1}, 8), PipelineMode::kIdeal), 82);
  EXPECT_GT(played(sharing(stages, 0, 4), depthTable({7, 5, 3, 1}, 8)),
            played(stagesOf({2, 2, 2, 2}, 4), depthTable({7, 5, 3, 1}, 8), PipelineMode::kTorch));
}

// A transfer without bytes takes no port.
TEST(SharedPorts, LatencyIsNotShared) {
  Random random(11);
  for (int round = 0; round < kPipelineRounds / 5; ++round) {
    const int count = 2 + static_cast<int>(random.below(4));
    auto stages = randomStages(random, count);
    const PipelineTable table = randomTable(random, count, 1 + static_cast<int>(random.below(5)), round % 2 == 1);
    const double alone = played(stages, table);
    stages.front().port_seconds = std::min(std::numeric_limits<double>::denorm_min(), stages.front().transfer_seconds);
    EXPECT_DOUBLE_EQ(played(stages, table), alone);
  }
}

TEST(SharedPorts, NeverFasterThanIndependentLinks) {
  Random random(12);
  for (int round = 0; round < kPipelineRounds; ++round) {
    const int count = 2 + static_cast<int>(random.below(4));
    const int microbatches = 1 + static_cast<int>(random.below(6));
    auto stages = randomStages(random, count, 8);
    for (StageTimes& stage : stages) {
      stage.port_seconds = stage.transfer_seconds * random.uniform();
    }
    const PipelineTable table = randomTable(random, count, microbatches, round % 2 == 1);
    EXPECT_GE(played(stages, table), played(independent(stages), table));
    const PipelineTable strict = depthTable(classDepths(count, microbatches), microbatches);
    const double in_class = played(stages, strict, PipelineMode::kClass);
    EXPECT_GE(in_class, played(independent(stages), strict, PipelineMode::kClass));
    EXPECT_EQ(in_class, played(stages, strict, PipelineMode::kClass));
  }
}

using Intervals = std::vector<std::pair<double, double>>;

// When each rank's two ports are taken, by a timeline of independent links.
struct Ports {
  Ports(const PipelineRun& run, const std::vector<StageTimes>& stages) : sends(stages.size()), receives(stages.size()) {
    for (const PipelineSpan& moved : run.transfers) {
      const bool forward = moved.action.kind == ActionKind::kSendForward;
      const std::size_t from = index(moved.rank);
      const std::size_t to = forward ? from + 1 : from - 1;
      const double until = moved.begin_seconds + stages[std::min(from, to)].port_seconds;
      sends[from].emplace_back(moved.begin_seconds, until);
      receives[to].emplace_back(moved.begin_seconds, until);
    }
  }

  std::vector<Intervals> sends;
  std::vector<Intervals> receives;
};

bool overlap(Intervals intervals) {
  std::ranges::sort(intervals);
  for (std::size_t i = 1; i < intervals.size(); ++i) {
    if (intervals[i].first < intervals[i - 1].second) {
      return true;
    }
  }
  return false;
}

// A receive is posted while the rank sends. Posts follow the computation before them at once.
bool postsWhileSending(const std::vector<PipelineAction>& row, const PipelineRun& run, const Intervals& sends) {
  std::map<std::string, double> ends;
  for (const PipelineSpan& span : run.spans) {
    ends[toString(span.action)] = span.end_seconds;
  }
  double now = 0;
  for (const PipelineAction& action : row) {
    if (action.kind <= ActionKind::kBackwardWeight) {
      now = ends.at(toString(action));
    } else if (action.kind == ActionKind::kReceiveForward || action.kind == ActionKind::kReceiveBackward) {
      if (std::ranges::any_of(sends, [now](const auto& taken) { return taken.first <= now && now < taken.second; })) {
        return true;
      }
    }
  }
  return false;
}

TEST(SharedPorts, EqualWhereNothingMeets) {
  Random random(13);
  int equal = 0;
  for (int round = 0; round < kPipelineRounds; ++round) {
    const int count = 2 + static_cast<int>(random.below(3));
    const auto stages = sharing(randomStages(random, count), 0.5, 0.25);
    const PipelineTable table = randomTable(random, count, 1 + static_cast<int>(random.below(3)), random.below(2) == 1);
    const PipelineRun alone = simulateTable(independent(stages), table, PipelineMode::kTorch, true);
    const PipelineTable lowered = lowerTable(table);
    const Ports ports(alone, stages);
    bool meets = std::ranges::any_of(ports.sends, overlap) || std::ranges::any_of(ports.receives, overlap);
    for (std::size_t rank = 0; rank < stages.size(); ++rank) {
      meets = meets || postsWhileSending(lowered[rank], alone, ports.sends[rank]);
    }
    if (!meets) {
      EXPECT_EQ(played(stages, table), alone.seconds);
      ++equal;
    }
  }
  EXPECT_GT(equal, kPipelineRounds / 20);
}

TEST(SharedPorts, DeadlocksAndBadPortsAreNamed) {
  auto stages = sharing(stagesOf({1, 1}, 0), 1, 2);
  PipelineTable table = depthTable({2, 2}, 2);
  std::swap(table[0][1], table[0][2]);
  EXPECT_THROW_MESSAGE(played(stages, table), std::invalid_argument, "deadlock: rank 0 waits for ever at action 1");
  stages[0].port_seconds = 4;
  EXPECT_THROW_MESSAGE(played(stages, depthTable({2, 1}, 2)), std::invalid_argument,
                       "port_seconds = 4: allowed 0 to transfer_seconds; it is of stage 0");
  stages[0].port_seconds = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THROW_MESSAGE(played(stages, depthTable({2, 1}, 2)), std::invalid_argument, "port_seconds = nan");
}

}  // namespace
}  // namespace torchext::core::testing
