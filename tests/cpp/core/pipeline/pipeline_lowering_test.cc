#include "core/pipeline/pipeline_lowering.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <stdexcept>

#include "core/pipeline/pipeline_orders.h"
#include "core/pipeline/pipeline_program.h"
#include "tests/cpp/core/base/expect_throw.h"
#include "tests/cpp/core/pipeline/pipeline_cases.h"

namespace torchext::core::testing {
namespace {

bool isCompute(const PipelineAction& action) { return action.kind <= ActionKind::kBackwardWeight; }

// Of the given kind, in the order of the row.
Ints microbatchesOf(const std::vector<PipelineAction>& row, ActionKind kind) {
  Ints found;
  for (const PipelineAction& action : row) {
    if (action.kind == kind) {
      found.push_back(action.microbatch);
    }
  }
  return found;
}

std::ptrdiff_t place(const std::vector<PipelineAction>& row, const PipelineAction& action) {
  return std::ranges::find(row, action) - row.begin();
}

// What torch 2.15 makes of 1F1B with two stages.
TEST(PipelineLowering, SmallTable) {
  const PipelineTable lowered = lowerTable(depthTable({2, 1}, 2));
  EXPECT_EQ(textOf(lowered[0]), "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1");
  EXPECT_EQ(textOf(lowered[1]), "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1");
}

void checkLowered(const PipelineTable& table, const PipelineTable& lowered) {
  const std::size_t stages = table.size();
  for (std::size_t rank = 0; rank < stages; ++rank) {
    std::vector<PipelineAction> computed;
    std::ranges::copy_if(lowered[rank], std::back_inserter(computed), isCompute);
    EXPECT_EQ(computed, table[rank]);
    for (std::size_t i = 0; i < lowered[rank].size(); ++i) {
      const PipelineAction& action = lowered[rank][i];
      const bool back = action.kind == ActionKind::kBackward || action.kind == ActionKind::kBackwardInput;
      if (action.kind == ActionKind::kForward && rank + 1 < stages) {
        EXPECT_EQ(lowered[rank][i + 1].kind, ActionKind::kSendForward);
      }
      if (back && rank > 0) {
        EXPECT_EQ(lowered[rank][i + 1].kind, ActionKind::kSendBackward);
      }
      const auto here = static_cast<std::ptrdiff_t>(i);
      if (action.kind == ActionKind::kForward && rank > 0) {
        EXPECT_LT(place(lowered[rank], {ActionKind::kReceiveForward, action.stage, action.microbatch}), here);
      }
      if (back && rank + 1 < stages) {
        EXPECT_LT(place(lowered[rank], {ActionKind::kReceiveBackward, action.stage, action.microbatch}), here);
      }
    }
    if (rank + 1 < stages) {  // neighbours list their sends and receives in one order
      EXPECT_EQ(microbatchesOf(lowered[rank], ActionKind::kSendForward),
                microbatchesOf(lowered[rank + 1], ActionKind::kReceiveForward));
      EXPECT_EQ(microbatchesOf(lowered[rank + 1], ActionKind::kSendBackward),
                microbatchesOf(lowered[rank], ActionKind::kReceiveBackward));
    }
  }
}

TEST(PipelineLowering, RandomTables) {
  Random random(9);
  for (int round = 0; round < 200; ++round) {
    const int stages = 1 + static_cast<int>(random.below(5));
    const int microbatches = 1 + static_cast<int>(random.below(6));
    const PipelineTable table = randomTable(random, stages, microbatches, round % 2 == 1);
    checkLowered(table, lowerTable(table));
  }
}

TEST(PipelineLowering, DeadlockNamesRankAndAction) {
  PipelineTable table = depthTable({1, 1}, 2);
  std::swap(table[1][0], table[1][2]);  // stage 1 begins with F1, which stage 0 runs after B0
  std::swap(table[1][1], table[1][3]);
  EXPECT_THROW_MESSAGE(lowerTable(table), std::invalid_argument, "deadlock: rank 0 waits for ever at action 1, 0B0");
}

TEST(PipelineProgram, ClassWaitsForSends) {
  std::string text;
  const PipelineProgram program = classProgram(depthTable(classDepths(3, 4), 4));
  for (const ProgramStep& step : program[1]) {
    text += (step.waits ? "wait-" : "") + toString(step.action) + " ";
  }
  EXPECT_EQ(text,
            "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 wait-1SEND_F0 "
            "1SEND_F1 1RECV_B0 wait-1SEND_F1 1B0 1SEND_B0 1RECV_F2 wait-1SEND_B0 1F2 "
            "1SEND_F2 1RECV_B1 wait-1SEND_F2 1B1 1SEND_B1 1RECV_F3 wait-1SEND_B1 1F3 "
            "1SEND_F3 1RECV_B2 wait-1SEND_F3 1B2 1SEND_B2 1RECV_B3 1B3 wait-1SEND_B2 1SEND_B3 wait-1SEND_B3 ");
}

}  // namespace
}  // namespace torchext::core::testing
