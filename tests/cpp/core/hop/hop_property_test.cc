// Randomised schedules of Hop: the token identity, the gap bounds and what is dequeued hold in every one, and all
// workers finish.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>

#include "core/base/check.h"
#include "core/base/random.h"
#include "hop_simulator.h"

namespace torchext::core::testing {
namespace {

#ifdef TORCHEXT_SANITIZED
constexpr int kSchedulesPerMode = 500;
#else
constexpr int kSchedulesPerMode = 12500;  // 8 modes: 1e5
#endif

CommunicationGraph randomGraph(Random& random, int size) {
  // A one-way cycle in random order keeps it connected; more edges at random, most of them one way.
  std::vector<int> order(index(size));
  std::iota(order.begin(), order.end(), 0);
  random.shuffle(order);
  std::vector<std::vector<int>> out(index(size));
  const auto connect = [&out](int from, int to) {
    auto& ranks = out[index(from)];
    if (from != to && std::find(ranks.begin(), ranks.end(), to) == ranks.end()) {
      ranks.push_back(to);
    }
  };
  for (int i = 0; i < size; ++i) {
    connect(order[index(i)], order[index((i + 1) % size)]);
  }
  for (int edges = static_cast<int>(random.below(static_cast<std::uint32_t>(size) + 1)); edges > 0; --edges) {
    const auto any = [&] { return static_cast<int>(random.below(static_cast<std::uint32_t>(size))); };
    connect(any(), any());
  }
  return CommunicationGraph::fromNeighbours(out);
}

// A few graphs of every kind, built once.
std::vector<CommunicationGraph> graphs() {
  std::vector<CommunicationGraph> result;
  for (const int size : {1, 2, 3, 4, 5, 6, 8, 12, 16}) {
    for (const auto kind :
         {GraphKind::kRing, GraphKind::kRingBased, GraphKind::kDoubleRing, GraphKind::kExponential, GraphKind::kFull}) {
      // Large dense graphs cost the most and show the least.
      if ((kind != GraphKind::kDoubleRing || size % 2 == 0) && (kind != GraphKind::kFull || size <= 8)) {
        result.push_back(CommunicationGraph::builtIn(kind, size));
      }
    }
  }
  Random random(17);
  for (int i = 0; i < 24; ++i) {
    result.push_back(randomGraph(random, 2 + static_cast<int>(random.below(9))));
  }
  result.push_back(CommunicationGraph::fromNeighbours({{1}, {2}, {3}, {4}, {5}, {0}}));
  return result;
}

class HopSchedules : public ::testing::TestWithParam<std::pair<const char*, HopMode>> {};

TEST_P(HopSchedules, IdentityAndBoundsHoldAndEverybodyFinishes) {
  const HopMode& kind = GetParam().second;
  const auto all = graphs();
  Random random(23);
  std::int64_t tight = 0;
  std::int64_t skipped = 0;
  std::int64_t held_back = 0;
  for (int schedule = 0; schedule < kSchedulesPerMode; ++schedule) {
    auto choice = random.below(static_cast<std::uint32_t>(all.size()));
    while (kind.backup_workers > 0 && all[choice].size() == 1) {  // nobody to leave out
      choice = random.below(static_cast<std::uint32_t>(all.size()));
    }
    const auto& graph = all[choice];
    const auto up_to = [&random](int bound) {
      return 1 + static_cast<int>(random.below(static_cast<std::uint32_t>(bound)));
    };
    HopSimulationOptions options{.mode = kind};
    HopMode& mode = options.mode;
    // A 1 in the parameter means: some number. Small numbers make the bounds bite.
    mode.max_iteration_gap = mode.hasTokens() ? up_to(4) : 0;
    mode.staleness = mode.staleness > 0 ? up_to(4) : 0;
    mode.backup_workers = mode.backup_workers > 0 ? up_to(std::min(3, graph.smallestInDegree() - 1)) : 0;
    mode.max_jump = mode.skips() ? 1 + up_to(6) : 0;
    mode.jump_trigger = mode.skips() ? up_to(3) : 1;
    ASSERT_NO_THROW(validateHopMode(mode, graph));
    options.jitter = random.uniform();
    options.random_slowdown = up_to(10);
    options.slowdown_probability = random.uniform() < 0.5 ? 0.0 : 0.2;
    if (random.uniform() < 0.5) {
      options.slowdown.assign(index(graph.size()), 1.0);
      options.slowdown[random.below(static_cast<std::uint32_t>(graph.size()))] = up_to(12);
    }
    options.message_time = random.uniform() < 0.2 ? 0.0 : 2.0 * random.uniform();
    options.message_jitter = 1.0;
    options.token_time = random.uniform() < 0.5 ? 0.0 : random.uniform();
    options.store_time = random.uniform() < 0.5 ? 0.0 : random.uniform();
    options.reduce_time = random.uniform() < 0.5 ? 0.0 : random.uniform();
    options.iterations = 5 + up_to(10);
    options.seed = random.next();
    const auto result = simulateHop(graph, gapBounds(mode, graph), options);
    ASSERT_EQ(result.violation, "") << "schedule " << schedule << ", " << graph.size() << " ranks";
    ASSERT_TRUE(result.finished) << "deadlock in schedule " << schedule << ", " << graph.size() << " ranks";
    for (int rank = 0; rank < graph.size(); ++rank) {
      ASSERT_EQ(result.reached[index(rank)], options.iterations);
    }
    const auto computed = std::accumulate(result.computed.begin(), result.computed.end(), std::int64_t{0});
    ASSERT_EQ(computed + result.skipped, options.iterations * graph.size());
    tight += result.tight;
    skipped += result.skipped;
    held_back += result.held_back;
  }
  // The bounds are attained, and the rarer paths are walked: this test would notice a bound that is too generous.
  EXPECT_GT(tight, kSchedulesPerMode / 10);
  EXPECT_EQ(skipped > kSchedulesPerMode / 10, kind.skips()) << skipped;
  // Only staleness reads models that a newer one can meet; without tokens slots are so many that it is rare.
  if (kind.staleness == 0) {
    EXPECT_EQ(held_back, 0);
  } else if (kind.hasTokens()) {
    EXPECT_GT(held_back, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Modes, HopSchedules,
    ::testing::Values(
        std::pair<const char*, HopMode>{"Standard", {}},
        std::pair<const char*, HopMode>{"NotifyAck", {.notify_ack = true}},
        std::pair<const char*, HopMode>{"StandardTokens", {.max_iteration_gap = 1}},
        std::pair<const char*, HopMode>{"Backup", {.max_iteration_gap = 1, .backup_workers = 1}},
        std::pair<const char*, HopMode>{"BackupSkip", {.max_iteration_gap = 1, .backup_workers = 1, .max_jump = 2}},
        std::pair<const char*, HopMode>{"Staleness", {.staleness = 1}},
        std::pair<const char*, HopMode>{"StalenessTokens", {.max_iteration_gap = 1, .staleness = 1}},
        std::pair<const char*, HopMode>{"StalenessSkip", {.max_iteration_gap = 1, .staleness = 1, .max_jump = 2}}),
    [](const auto& mode) { return std::string(mode.param.first); });

// A wrong bound must show: one iteration less than allowed is exceeded in every mode.
TEST(HopProperty, TighterBoundsAreExceeded) {
  const auto graph = CommunicationGraph::builtIn(GraphKind::kRing, 6);
  for (const HopMode& mode : std::vector<HopMode>{{},
                                                  {.max_iteration_gap = 1},
                                                  {.max_iteration_gap = 2, .backup_workers = 1},
                                                  {.staleness = 2},
                                                  {.max_iteration_gap = 2, .staleness = 3}}) {
    auto bounds = gapBounds(mode, graph);
    HopSimulationOptions options{.mode = mode, .slowdown = {50, 1, 1, 1, 1, 1}, .iterations = 20};
    EXPECT_EQ(simulateHop(graph, bounds, options).violation, "");
    for (auto& row : bounds) {
      for (int& bound : row) {
        bound = std::max(0, bound - 1);
      }
    }
    EXPECT_NE(simulateHop(graph, bounds, options).violation, "");
  }
}

TEST(HopProperty, EqualSeedsGiveEqualRuns) {
  const auto graph = CommunicationGraph::builtIn(GraphKind::kRingBased, 8);
  const HopMode mode{.max_iteration_gap = 3, .backup_workers = 1, .max_jump = 3};
  const HopSimulationOptions options{
      .mode = mode, .jitter = 0.5, .random_slowdown = 6, .slowdown_probability = 0.1, .duration = 200, .seed = 5};
  const auto one = simulateHop(graph, gapBounds(mode, graph), options);
  EXPECT_EQ(one.computed, simulateHop(graph, gapBounds(mode, graph), options).computed);
}

}  // namespace
}  // namespace torchext::core::testing
