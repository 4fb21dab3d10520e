#include "core/pipeline/pipeline_orders.h"

#include <gtest/gtest.h>

#include <stdexcept>

#include "tests/cpp/core/base/expect_throw.h"
#include "tests/cpp/core/pipeline/pipeline_cases.h"

namespace torchext::core::testing {
namespace {

TEST(PipelineOrders, DepthsAreForwardsThenTurnsThenBackwards) {
  const PipelineTable table = depthTable({3, 1}, 4);
  EXPECT_EQ(textOf(table[0]), "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3");
  EXPECT_EQ(textOf(table[1]), "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3");
  EXPECT_EQ(checkTable(table), 4);
  EXPECT_EQ(mostInFlight(table), (Ints{3, 1}));
}

TEST(PipelineOrders, Strict1F1BKeepsAsManyAsStagesAreLeft) {
  EXPECT_EQ(classDepths(4, 8), (Ints{4, 3, 2, 1}));
  EXPECT_EQ(classDepths(4, 2), (Ints{2, 2, 2, 1}));
  EXPECT_EQ(mostInFlight(depthTable(classDepths(4, 8), 8)), (Ints{4, 3, 2, 1}));
}

TEST(PipelineOrders, GPipeRunsAllForwardsFirst) {
  EXPECT_EQ(textOf(gpipeTable(2, 2)[1]), "1F0 1F1 1B0 1B1");
  EXPECT_EQ(mostInFlight(gpipeTable(3, 5)), (Ints{5, 5, 5}));
}

// As torch 2.15's ScheduleInterleavedZeroBubble prints them.
TEST(PipelineOrders, ZeroBubbleOfTorch) {
  const PipelineTable table = zeroBubbleClassTable(2, 4);
  EXPECT_EQ(textOf(table[0]), "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0F3 0I2 0W2 0I3 0W3");
  EXPECT_EQ(textOf(table[1]), "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1F3 1I3 1W2 1W3");
  EXPECT_EQ(mostInFlight(zeroBubbleClassTable(4, 8)), (Ints{4, 4, 4, 4}));
  for (const int microbatches : {1, 2, 3, 5, 9}) {
    EXPECT_EQ(checkTable(zeroBubbleClassTable(4, microbatches)), microbatches);
  }
}

TEST(PipelineOrders, BadDepths) {
  EXPECT_THROW_MESSAGE(depthTable({2, 3}, 4), std::invalid_argument, "depth = 3: allowed at most 2");
  EXPECT_THROW_MESSAGE(depthTable({2, 0}, 4), std::invalid_argument, "depth = 0: allowed 1..4");
  EXPECT_THROW_MESSAGE(depthTable({5, 1}, 4), std::invalid_argument, "depth = 5: allowed 1..4");
  EXPECT_THROW_MESSAGE(depthTable({}, 4), std::invalid_argument, "stages = 0");
  EXPECT_THROW_MESSAGE(depthTable({1}, 0), std::invalid_argument, "microbatches = 0");
  EXPECT_THROW_MESSAGE(zeroBubbleClassTable(0, 1), std::invalid_argument, "stages = 0");
}

TEST(PipelineTable, BadRowsAreNamed) {
  const PipelineAction forward{ActionKind::kForward, 0, 0};
  const PipelineAction backward{ActionKind::kBackward, 0, 0};
  const PipelineAction input{ActionKind::kBackwardInput, 0, 0};
  const PipelineAction weight{ActionKind::kBackwardWeight, 0, 0};
  EXPECT_THROW_MESSAGE(checkTable({}), std::invalid_argument, "number of ranks of a table = 0");
  EXPECT_THROW_MESSAGE(checkTable({{}}), std::invalid_argument, "number of micro-batches of a table = 0");
  EXPECT_THROW_MESSAGE(checkTable({{backward, forward}}), std::invalid_argument, "rank 0, action 0B0: B comes once");
  EXPECT_THROW_MESSAGE(checkTable({{forward, backward, backward}}), std::invalid_argument, "B comes once");
  EXPECT_THROW_MESSAGE(checkTable({{forward, weight, input}}), std::invalid_argument, "W comes once, after its I");
  EXPECT_THROW_MESSAGE(checkTable({{forward, backward, weight}}), std::invalid_argument, "W comes once");
  EXPECT_THROW_MESSAGE(checkTable({{forward, input}}), std::invalid_argument, "micro-batch 0 has no W");
  EXPECT_THROW_MESSAGE(checkTable({{forward}}), std::invalid_argument, "micro-batch 0 has no B");
  EXPECT_THROW_MESSAGE(checkTable({{forward, backward}, {}}), std::invalid_argument, "rank 1: micro-batch 0 has no F");
  EXPECT_THROW_MESSAGE(checkTable({{forward, backward}, {forward}}), std::invalid_argument, "allowed stage 1");
  EXPECT_THROW_MESSAGE(checkTable({{forward, {ActionKind::kSendForward, 0, 0}}}), std::invalid_argument,
                       "action 0SEND_F0");
  EXPECT_THROW_MESSAGE(checkTable({{forward, {ActionKind::kBackward, 0, 7}}}), std::invalid_argument,
                       "allowed micro-batches 0..0");
}

TEST(PipelineTable, Names) {
  for (const char* name : {"F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"}) {
    EXPECT_STREQ(toString(parseActionKind(name)), name);
  }
  EXPECT_THROW_MESSAGE(parseActionKind("X"), std::invalid_argument, "kind");
  for (const char* name : {"1f1b", "gpipe", "zero-bubble"}) {
    EXPECT_STREQ(toString(parseOrderFamily(name)), name);
  }
  EXPECT_THROW_MESSAGE(parseOrderFamily("2f2b"), std::invalid_argument, "1f1b, gpipe, zero-bubble");
}

}  // namespace
}  // namespace torchext::core::testing
