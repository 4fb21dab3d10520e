#include "core/auto/consensus.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>
#include <stdexcept>

#include "core/auto/step_samples.h"
#include "core/base/check.h"
#include "core/hop/communication_graph.h"
#include "tests/cpp/core/base/expect_throw.h"

namespace torchext::core {
namespace {

std::vector<std::vector<double>> matrixOf(const CommunicationGraph& graph) {
  std::vector<std::vector<double>> weights(index(graph.size()), std::vector<double>(index(graph.size())));
  for (int from = 0; from < graph.size(); ++from) {
    for (int to = 0; to < graph.size(); ++to) {
      weights[index(from)][index(to)] = graph.weight(from, to);
    }
  }
  return weights;
}

double rhoOf(GraphKind kind, int ranks) { return mixingRho(matrixOf(CommunicationGraph::builtIn(kind, ranks))); }

TEST(Consensus, RandomGroups) {
  EXPECT_DOUBLE_EQ(groupRho(4, 2), 1.0 / 3);
  EXPECT_DOUBLE_EQ(groupRho(8, 4), 1.0 / 7);
  EXPECT_DOUBLE_EQ(groupRho(16, 2), 7.0 / 15);
  EXPECT_DOUBLE_EQ(groupRho(16, 4), 0.2);
  EXPECT_EQ(groupRho(16, 16), 0);
  EXPECT_EQ(groupRho(16, 1), 1);
  EXPECT_EQ(groupRho(1, 1), 0);
  EXPECT_THROW_MESSAGE(groupRho(4, 5), std::invalid_argument, "group = 5: allowed 1..4");
}

TEST(Consensus, UniformRings) {
  EXPECT_NEAR(rhoOf(GraphKind::kRing, 4), 1.0 / 9, 1e-9);
  EXPECT_NEAR(rhoOf(GraphKind::kRing, 8), 0.647603, 5e-7);
  for (const int ranks : {3, 5, 16, 100}) {
    const double lambda = (1 + 2 * std::cos(2 * std::numbers::pi / ranks)) / 3;
    EXPECT_NEAR(rhoOf(GraphKind::kRing, ranks), ranks == 3 ? 0 : lambda * lambda, 1e-9) << ranks;
  }
}

TEST(Consensus, OtherGraphs) {
  EXPECT_NEAR(rhoOf(GraphKind::kFull, 12), 0, 1e-12);
  EXPECT_EQ(mixingRho({{1}}), 0);
  EXPECT_NEAR(mixingRho({{1, 0}, {0, 1}}), 1, 1e-12);
  EXPECT_NEAR(mixingRho({{0.75, 0.25}, {0.25, 0.75}}), 0.25, 1e-12);
  EXPECT_LT(rhoOf(GraphKind::kExponential, 16), rhoOf(GraphKind::kRing, 16));
}

TEST(Consensus, ARingOf1024Ranks) {
  const double lambda = (1 + 2 * std::cos(2 * std::numbers::pi / 1024)) / 3;
  EXPECT_NEAR(rhoOf(GraphKind::kRing, 1024), lambda * lambda, 1e-7);
}

TEST(Consensus, MatricesThatAreNoMixing) {
  EXPECT_THROW_MESSAGE(mixingRho({}), std::invalid_argument, "number of rows of weights = 0");
  EXPECT_THROW_MESSAGE(mixingRho({{1, 0}}), std::invalid_argument, "size of a row of weights = 2: allowed 1");
  EXPECT_THROW_MESSAGE(mixingRho({{0.5, 0.4}, {0.5, 0.6}}), std::invalid_argument, "sum of a row of weights = 0.9");
  EXPECT_THROW_MESSAGE(mixingRho({{1, 0}, {1, 0}}), std::invalid_argument, "sum of a column of weights = 2");
}

TEST(StepSamples, ExpectedMaximum) {
  EXPECT_DOUBLE_EQ(expectedMaximum({3, 1, 4, 2}, 1), 2.5);
  EXPECT_DOUBLE_EQ(expectedMaximum({1, 2, 3, 4}, 2), 3.125);
  EXPECT_DOUBLE_EQ(expectedMaximum({1, 2, 3, 4}, 4), 3.6171875);
  const std::vector<double> rare{1, 1, 1, 1, 1, 1, 1, 1, 1, 6};
  EXPECT_NEAR(expectedMaximum(rare, 1), 1.5, 1e-12);
  EXPECT_NEAR(expectedMaximum(rare, 2), 1.95, 1e-12);
  EXPECT_NEAR(expectedMaximum(rare, 4), 2.7195, 1e-12);
  EXPECT_NEAR(expectedMaximum(rare, 8), 3.84766395, 1e-12);
}

TEST(StepSamples, RanksAlikeArePooled) {
  const StepSamples samples({{1, 1, 1, 1, 6}, {1, 1, 1, 1, 1}});
  EXPECT_TRUE(samples.apartRanks().empty());
  EXPECT_NEAR(samples.slowest(4, 4), 2.7195, 1e-12);
  EXPECT_NEAR(samples.slowest(2, 1024), 1.95, 1e-12);
}

TEST(StepSamples, ASlowRankIsKeptApart) {
  const StepSamples samples({{1, 1, 1}, {1, 1, 1}, {3, 3, 3}, {1, 1, 1}});
  EXPECT_EQ(samples.apartRanks(), std::vector<int>{2});
  EXPECT_NEAR(samples.slowest(4, 4), 3, 1e-12);    // it is always there
  EXPECT_NEAR(samples.slowest(2, 4), 2, 1e-12);    // in every second group of two
  EXPECT_NEAR(samples.slowest(1, 4), 1.5, 1e-12);  // the mean
  EXPECT_NEAR(samples.slowest(64, 64), 3, 1e-12);
  EXPECT_NEAR(samples.slowest(1, 64), 1 + 2.0 / 64, 1e-12);
}

TEST(StepSamples, TwoRanksApart) {
  const StepSamples samples({{1}, {1}, {1}, {1}, {2}, {4}});
  EXPECT_EQ(samples.apartRanks(), (std::vector<int>{4, 5}));
  // Of the 15 pairs 5 have the slowest, 4 more the other.
  EXPECT_NEAR(samples.slowest(2, 6), (5 * 4 + 4 * 2 + 6 * 1) / 15.0, 1e-12);
  EXPECT_NEAR(samples.slowest(6, 6), 4, 1e-12);
}

TEST(StepSamples, BadSamplesAreNamed) {
  EXPECT_THROW_MESSAGE(StepSamples({}), std::invalid_argument, "ranks with step samples = 0");
  EXPECT_THROW_MESSAGE(StepSamples({{1}, {}}), std::invalid_argument, "of rank 1");
  EXPECT_THROW_MESSAGE(StepSamples({{1}, {0}}), std::invalid_argument, "step sample = 0");
  EXPECT_THROW_MESSAGE(expectedMaximum({1}, 0), std::invalid_argument, "draws = 0");
}

}  // namespace
}  // namespace torchext::core
