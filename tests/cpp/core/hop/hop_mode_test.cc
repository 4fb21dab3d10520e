#include "core/hop/hop_mode.h"

#include <gtest/gtest.h>

#include <stdexcept>

#include "tests/cpp/core/base/expect_throw.h"

namespace torchext::core {
namespace {

const CommunicationGraph& ring() {
  static const auto graph = CommunicationGraph::builtIn(GraphKind::kRing, 8);
  return graph;
}

TEST(HopMode, LegalCombinations) {
  const std::vector<HopMode> legal{
      {},
      {.notify_ack = true},
      {.max_iteration_gap = 1},
      {.max_iteration_gap = 4, .backup_workers = 1},
      {.max_iteration_gap = 4, .backup_workers = 2, .max_jump = 10},
      {.staleness = 5},
      {.max_iteration_gap = 8, .staleness = 5},
      {.max_iteration_gap = 8, .staleness = 5, .max_jump = 2, .jump_trigger = 3},
  };
  for (const auto& mode : legal) {
    EXPECT_NO_THROW(validateHopMode(mode, ring()));
  }
}

TEST(HopMode, IllegalCombinationsSayWhatToSet) {
  const auto refused = [](const HopMode& mode, const char* part) {
    EXPECT_THROW_MESSAGE(validateHopMode(mode, ring()), std::invalid_argument, part);
  };
  refused({.max_iteration_gap = -1}, "max_iteration_gap = -1: allowed 0 or more");
  refused({.backup_workers = -1}, "backup_workers = -1");
  refused({.staleness = -1}, "staleness = -1");
  refused({.max_jump = -1}, "max_jump = -1");
  refused({.backup_workers = 1}, "max_iteration_gap = 0: allowed 1 or more with backup_workers = 1");
  refused({.max_iteration_gap = 4, .backup_workers = 3}, "backup_workers = 3: allowed 0..2: some rank has 3");
  refused({.max_iteration_gap = 4, .backup_workers = 1, .staleness = 1},
          "staleness = 1: allowed 0 with backup_workers");
  refused({.max_iteration_gap = 4, .max_jump = 4}, "max_jump = 4: allowed 0 without backup_workers or staleness");
  refused({.staleness = 2, .max_jump = 4}, "max_iteration_gap = 0: allowed 1 or more with max_jump = 4");
  refused({.max_iteration_gap = 4, .staleness = 2, .max_jump = 1},
          "max_jump = 1: allowed 0 (no skipping) or 2 and more");
  refused({.max_iteration_gap = 4, .staleness = 2, .max_jump = 2, .jump_trigger = 0}, "jump_trigger = 0");
  refused({.notify_ack = true, .max_iteration_gap = 2}, "max_iteration_gap = 2: allowed 0 with notify_ack");
  refused({.notify_ack = true, .backup_workers = 1}, "backup_workers = 1: allowed 0 with notify_ack");
  refused({.notify_ack = true, .staleness = 1}, "staleness = 1: allowed 0 with notify_ack");
  refused({.jump_trigger = 3}, "jump_trigger = 3: allowed 1 (the default) without max_jump");
  refused({.notify_ack = true, .max_jump = 3}, "max_jump = 3: allowed 0 with notify_ack");
}

// Written out, so that the property tests have something to rely on.
TEST(HopMode, TheFiveGapBounds) {
  EXPECT_EQ(iterationGapBound({}, 3, 5), 3);
  EXPECT_EQ(toldGapBound({}, /*gives_tokens=*/false, 5), 1);
  EXPECT_EQ(toldGapBound({.max_iteration_gap = 1, .staleness = 4}, /*gives_tokens=*/true, 2), 2);
  EXPECT_EQ(toldGapBound({.max_iteration_gap = 1, .staleness = 4}, /*gives_tokens=*/false, 2), 5);
  EXPECT_EQ(iterationGapBound({.notify_ack = true}, 3, 5), 3);
  EXPECT_EQ(iterationGapBound({.notify_ack = true}, 3, 1), 2);
  EXPECT_EQ(iterationGapBound({.max_iteration_gap = 2}, 3, 5), 3);
  EXPECT_EQ(iterationGapBound({.max_iteration_gap = 2}, 3, 1), 2);
  EXPECT_EQ(iterationGapBound({.max_iteration_gap = 4, .backup_workers = 1}, 1, 5), 20);
  EXPECT_EQ(iterationGapBound({.staleness = 5}, 3, 1), 18);
  EXPECT_EQ(iterationGapBound({.max_iteration_gap = 8, .staleness = 5}, 3, 1), 8);
  EXPECT_EQ(iterationGapBound({.max_iteration_gap = 8, .staleness = 5}, 1, 3), 6);
}

TEST(HopMode, LeadsFollowTheEdges) {
  EXPECT_EQ(largestLead({}, ring()), 1);
  EXPECT_EQ(largestLead({.max_iteration_gap = 4, .backup_workers = 1}, ring()), 4);
  EXPECT_EQ(largestLead({.max_iteration_gap = 9, .staleness = 5}, ring()), 6);
  const auto one_way = CommunicationGraph::fromNeighbours({{1}, {2}, {3}, {0}});
  EXPECT_EQ(largestLead({}, one_way), 3);  // the sender hears of its receiver by three others
  EXPECT_EQ(largestLead({.max_iteration_gap = 2}, one_way), 2);
  EXPECT_EQ(largestLead({.notify_ack = true}, one_way), 2);
  EXPECT_EQ(largestLead({}, CommunicationGraph::builtIn(GraphKind::kRing, 1)), 0);
}

TEST(HopMode, JumpsBeginAboveTheTriggerAndEndAtTheLag) {
  const HopMode mode{.max_iteration_gap = 8, .backup_workers = 1, .max_jump = 4, .jump_trigger = 2};
  EXPECT_EQ(plannedJump(mode, -3), 1);
  EXPECT_EQ(plannedJump(mode, 2), 1);
  EXPECT_EQ(plannedJump(mode, 3), 3);
  EXPECT_EQ(plannedJump(mode, 9), 4);
  EXPECT_EQ(plannedJump({.max_iteration_gap = 8, .backup_workers = 1}, 9), 1);
}

}  // namespace
}  // namespace torchext::core
