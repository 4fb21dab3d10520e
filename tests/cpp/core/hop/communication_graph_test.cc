#include "core/hop/communication_graph.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "tests/cpp/core/base/expect_throw.h"

namespace torchext::core {
namespace {

using Ranks = std::vector<int>;

const std::vector<GraphKind> kAllKinds{GraphKind::kRing, GraphKind::kRingBased, GraphKind::kDoubleRing,
                                       GraphKind::kExponential, GraphKind::kFull};

void expectSound(const CommunicationGraph& graph, double tolerance) {
  const int size = graph.size();
  std::vector<double> given(index(size), 0.0);
  for (int rank = 0; rank < size; ++rank) {
    const auto& in = graph.inNeighbours(rank);
    ASSERT_TRUE(std::is_sorted(in.begin(), in.end()));
    ASSERT_TRUE(std::binary_search(in.begin(), in.end(), rank)) << "no self loop at " << rank;
    ASSERT_EQ(graph.inWeights(rank).size(), in.size());
    double taken = 0;
    for (std::size_t i = 0; i < in.size(); ++i) {
      const auto& out = graph.outNeighbours(in[i]);
      ASSERT_TRUE(std::binary_search(out.begin(), out.end(), rank));
      ASSERT_GT(graph.inWeights(rank)[i], 0);
      ASSERT_EQ(graph.weight(in[i], rank), graph.inWeights(rank)[i]);
      taken += graph.inWeights(rank)[i];
      given[index(in[i])] += graph.inWeights(rank)[i];
    }
    ASSERT_NEAR(taken, 1.0, tolerance);
  }
  for (const double sum : given) {
    ASSERT_NEAR(sum, 1.0, tolerance);
  }
}

TEST(CommunicationGraph, BuiltInGraphsOfEight) {
  const auto out = [](GraphKind kind, int rank) { return CommunicationGraph::builtIn(kind, 8).outNeighbours(rank); };
  EXPECT_EQ(out(GraphKind::kRing, 0), (Ranks{0, 1, 7}));
  EXPECT_EQ(out(GraphKind::kRingBased, 1), (Ranks{0, 1, 2, 5}));
  EXPECT_EQ(out(GraphKind::kDoubleRing, 0), (Ranks{0, 1, 2, 3, 4}));
  EXPECT_EQ(out(GraphKind::kDoubleRing, 5), (Ranks{1, 4, 5, 6, 7}));
  EXPECT_EQ(out(GraphKind::kExponential, 6), (Ranks{0, 2, 6, 7}));
  EXPECT_EQ(out(GraphKind::kFull, 3), (Ranks{0, 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_EQ(CommunicationGraph::builtIn(GraphKind::kExponential, 8).inNeighbours(0), (Ranks{0, 4, 6, 7}));
}

TEST(CommunicationGraph, BuiltInGraphsAreSoundAtEverySize) {
  for (const auto kind : kAllKinds) {
    for (int size = 1; size <= 33; ++size) {
      if (kind == GraphKind::kDoubleRing && size % 2 != 0) {
        continue;
      }
      expectSound(CommunicationGraph::builtIn(kind, size), 1e-12);
    }
  }
  expectSound(CommunicationGraph::builtIn(GraphKind::kExponential, 1024), 1e-12);
  expectSound(CommunicationGraph::builtIn(GraphKind::kRingBased, 1024), 1e-12);
}

TEST(CommunicationGraph, PathLengthsFollowTheDirection) {
  const auto ring = CommunicationGraph::builtIn(GraphKind::kRing, 8);
  EXPECT_EQ(ring.pathLengthsFrom(0), (Ranks{0, 1, 2, 3, 4, 3, 2, 1}));
  EXPECT_EQ(CommunicationGraph::builtIn(GraphKind::kRingBased, 8).pathLengthsFrom(0), (Ranks{0, 1, 2, 2, 1, 2, 2, 1}));
  const auto exponential = CommunicationGraph::builtIn(GraphKind::kExponential, 8);
  EXPECT_EQ(exponential.pathLength(0, 7), 3);
  EXPECT_EQ(exponential.pathLength(7, 0), 1);
  const auto one_way = CommunicationGraph::fromNeighbours({{1}, {2}, {3}, {0}});
  EXPECT_EQ(one_way.pathLength(0, 3), 3);
  EXPECT_EQ(one_way.pathLength(3, 0), 1);
  EXPECT_EQ(one_way.weight(0, 1), 0.5);
  EXPECT_EQ(one_way.weight(1, 0), 0.0);
}

TEST(CommunicationGraph, MetropolisWeightsOfAStar) {
  const auto star = CommunicationGraph::fromNeighbours({{1, 2, 3}, {0}, {0}, {0}});
  expectSound(star, 1e-15);
  EXPECT_DOUBLE_EQ(star.weight(1, 0), 0.25);
  EXPECT_DOUBLE_EQ(star.weight(0, 1), 0.25);
  EXPECT_DOUBLE_EQ(star.weight(0, 0), 0.25);
  EXPECT_DOUBLE_EQ(star.weight(1, 1), 0.75);
  EXPECT_EQ(star.smallestInDegree(), 2);
  // Metropolis and uniform are the same where all degrees are.
  const auto ring = CommunicationGraph::fromNeighbours({{1, 3}, {0, 2}, {1, 3}, {2, 0}});
  for (const int from : ring.inNeighbours(2)) {
    EXPECT_NEAR(ring.weight(from, 2), CommunicationGraph::builtIn(GraphKind::kRing, 4).weight(from, 2), 1e-15);
  }
}

TEST(CommunicationGraph, OneWayGraphsAreScaled) {
  const auto graph = CommunicationGraph::fromNeighbours({{1, 2}, {2}, {3}, {0, 4}, {0}});
  expectSound(graph, 1e-11);
  EXPECT_EQ(graph.inNeighbours(0), (Ranks{0, 3, 4}));
}

TEST(CommunicationGraph, WeightsOfTheUserAreKept) {
  const auto graph = CommunicationGraph::fromWeights({{0.5, 0.5, 0}, {0, 0.5, 0.5}, {0.5, 0, 0.5}});
  EXPECT_EQ(graph.outNeighbours(0), (Ranks{0, 1}));
  EXPECT_EQ(graph.weight(2, 0), 0.5);
  EXPECT_EQ(graph.weight(0, 2), 0.0);
  // Sums of floats are near 1 only.
  EXPECT_NO_THROW(CommunicationGraph::fromWeights({{0.5000004, 0.5}, {0.5, 0.5000004}}));
}

TEST(CommunicationGraph, NamesRoundTrip) {
  for (const auto kind : kAllKinds) {
    EXPECT_EQ(parseGraphKind(toString(kind)), kind);
  }
  EXPECT_THROW_MESSAGE(parseGraphKind("star"), std::invalid_argument,
                       "\"star\": allowed ring, ring-based, double-ring, exponential, full");
}

TEST(CommunicationGraph, BadInputNamesRanksAndValues) {
  using Graph = CommunicationGraph;
  EXPECT_THROW_MESSAGE(Graph::builtIn(GraphKind::kRing, 0), std::invalid_argument, "size = 0: allowed 1 or more");
  EXPECT_THROW_MESSAGE(Graph::builtIn(GraphKind::kDoubleRing, 7), std::invalid_argument, "size = 7: allowed even");
  EXPECT_THROW_MESSAGE(Graph::fromNeighbours({}), std::invalid_argument, "1 or more ranks");
  EXPECT_THROW_MESSAGE(Graph::fromNeighbours({{1}, {2}}), std::invalid_argument, "neighbour = 2: allowed 0..1; rank 1");
  EXPECT_THROW_MESSAGE(Graph::fromNeighbours({{1, 1}, {0}}), std::invalid_argument, "rank 0 names it twice");
  EXPECT_THROW_MESSAGE(Graph::fromNeighbours({{1}, {0}, {0}}), std::invalid_argument,
                       "no path leads from rank 0 to rank 2");
  EXPECT_THROW_MESSAGE(Graph::fromNeighbours({{1, 2}, {0}, {}}), std::invalid_argument,
                       "no path leads from rank 2 to rank 0");
  EXPECT_THROW_MESSAGE(Graph::fromWeights({{1, 0}, {0, 1}}), std::invalid_argument, "no path leads");
  EXPECT_THROW_MESSAGE(Graph::fromWeights({{0.5, 0.5}, {0.5}}), std::invalid_argument, "it is row 1");
  EXPECT_THROW_MESSAGE(Graph::fromWeights({{0.5, 0.5}, {0.25, 0.75}}), std::invalid_argument,
                       "sum of weights = 0.75: allowed 1 +- 1e-06 for what is averaged at rank 0");
  EXPECT_THROW_MESSAGE(Graph::fromWeights({{0.5, 0.25}, {0.5, 0.75}}), std::invalid_argument,
                       "for what is taken of rank 0");
  EXPECT_THROW_MESSAGE(Graph::fromWeights({{0, 1}, {1, 0}}), std::invalid_argument,
                       "weight = 0: allowed more than 0, finite; it is that of rank 0's model at rank 0");
  EXPECT_THROW_MESSAGE(Graph::fromWeights({{1.5, -0.5}, {-0.5, 1.5}}), std::invalid_argument, "weight = -0.5");
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THROW_MESSAGE(Graph::fromWeights({{nan, 1}, {1, 0}}), std::invalid_argument, "weight = nan");
  const auto ring = Graph::builtIn(GraphKind::kRing, 4);
  EXPECT_THROW_MESSAGE(static_cast<void>(ring.inNeighbours(4)), std::out_of_range, "rank = 4: allowed 0..3");
  EXPECT_THROW_MESSAGE(static_cast<void>(ring.pathLength(0, 4)), std::out_of_range, "rank = 4");
  EXPECT_THROW_MESSAGE(static_cast<void>(ring.weight(-1, 0)), std::out_of_range, "rank = -1");
}

}  // namespace
}  // namespace torchext::core
