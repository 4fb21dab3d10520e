#include "core/auto/collective_cost.h"

#include <gtest/gtest.h>

#include <stdexcept>

#include "core/auto/link_model.h"
#include "tests/cpp/core/auto/layered_model.h"
#include "tests/cpp/core/base/expect_throw.h"

namespace torchext::core::testing {
namespace {

constexpr double kGigabit = 125e6;  // bytes a second
constexpr double k64Kib = 65536;

LayerRows linear(std::size_t height, std::size_t width, std::size_t rows = 1) {
  return {LayerRows::Kind::kLinear, rows, height, width, 4};
}

TEST(CollectiveCost, RingAllReduce) {
  EXPECT_NEAR(allReduceSeconds(Algorithm::kRing, {4, {50e-6, kGigabit}}, 100e6), 1.2003, 1e-12);
  EXPECT_NEAR(allReduceSeconds(Algorithm::kRing, {16, {100e-6, kGigabit}}, k64Kib), 3.98304e-3, 1e-12);
  EXPECT_NEAR(allReduceSeconds(Algorithm::kRing, {8, {50e-6, 10 * kGigabit}}, 1e6), 2.1e-3, 1e-12);
}

TEST(CollectiveCost, HalvingDoubling) {
  EXPECT_NEAR(allReduceSeconds(Algorithm::kHalving, {8, {50e-6, 10 * kGigabit}}, 1e6), 1.7e-3, 1e-12);
  EXPECT_NEAR(allReduceSeconds(Algorithm::kHalving, {16, {100e-6, kGigabit}}, k64Kib), 1.78304e-3, 1e-12);
}

TEST(CollectiveCost, AHalfAndDirect) {
  const Network network{4, {50e-6, kGigabit}};
  EXPECT_NEAR(halfSeconds(Algorithm::kRing, network, 100e6), 0.60015, 1e-12);
  EXPECT_NEAR(halfSeconds(Algorithm::kDirect, network, 100e6), 0.60005, 1e-12);
  EXPECT_EQ(halfSeconds(Algorithm::kRing, {1, {50e-6, kGigabit}}, 100e6), 0);
}

TEST(CollectiveCost, Hierarchical) {
  const Network network{16, {1e-3, kGigabit}, 4, {5e-6, 8e9}};
  EXPECT_NEAR(allReduceSeconds(Algorithm::kHierarchical, network, 40e6), 493.53e-3, 1e-12);
  EXPECT_NEAR(allReduceSeconds(Algorithm::kRing, network, 40e6), 630e-3, 1e-12);
}

TEST(CollectiveCost, FactorsOfALinearLayer) {
  EXPECT_NEAR(fewestRowsToReduce(linear(25088, 4096), 8), 880.28, 5e-3);
  EXPECT_NEAR(fewestRowsToReduce(linear(1024, 4096), 8), 204.8, 1e-9);
  EXPECT_NEAR(fewestRowsToReduce(linear(2048, 1000), 16), 83.99, 5e-3);
  EXPECT_NEAR(fewestRowsToReduce(linear(4096, 4096), 4), 1024, 1e-9);
  EXPECT_NEAR(fewestRowsToReduce(linear(1024, 1024), 4), 256, 1e-9);
  // At K* a rank sends as many bytes either way.
  const double gradient = 2048 * 1000 * 4;
  EXPECT_NEAR(15 * rowBytes(linear(2048, 1000)) * fewestRowsToReduce(linear(2048, 1000), 16), 2 * 15 / 16.0 * gradient,
              1e-6 * gradient);
}

TEST(CollectiveCost, RowsOfAnEmbedding) {
  const LayerRows embedding{LayerRows::Kind::kEmbedding, 10, 50257, 768, 4};
  EXPECT_NEAR(fewestRowsToReduce(embedding, 4), 25063.2, 5e-2);
  EXPECT_EQ(rowBytes(embedding), 10 * (768 * 4 + 8));
  EXPECT_EQ(extraOperations(embedding, 4), 0);
}

TEST(CollectiveCost, SixteenRowsAre64TimesLess) {
  const LayerRows layer = linear(4096, 4096, 16);
  EXPECT_EQ(3 * rowBytes(layer), 1572864);
  EXPECT_EQ(2 * 3 / 4.0 * 4096 * 4096 * 4, 100663296);
  EXPECT_NEAR(rowsSeconds({4, {1e-3, 1e6}}, rowBytes(layer)), 3e-3 + 1.572864, 1e-12);
  EXPECT_EQ(extraOperations(layer, 4), 2.0 * 3 * 16 * 4096 * 4096);
}

TEST(CollectiveCost, TablesKeepTheirRatioToTheFormula) {
  const Network four{4, {1e-4, 1e8}};
  const Network many{64, {1e-4, 1e8}};
  const CostTable measured({{1000, 2 * halfSeconds(Algorithm::kRing, four, 1000)},
                            {1000000, 1.5 * halfSeconds(Algorithm::kRing, four, 1e6)}});
  const CostTable scaled = scaledTable(measured, Operation::kHalf, Algorithm::kRing, four, many);
  EXPECT_NEAR(scaled.seconds(1000), 2 * halfSeconds(Algorithm::kRing, many, 1000), 1e-12);
  EXPECT_NEAR(scaled.seconds(1000000), 1.5 * halfSeconds(Algorithm::kRing, many, 1e6), 1e-12);
  EXPECT_EQ(scaledTable(measured, Operation::kHalf, Algorithm::kRing, four, four).points(), measured.points());
  EXPECT_EQ(scaledTable(measured, Operation::kAllReduce, Algorithm::kRing, four, {1, {1e-4, 1e8}}).seconds(1000), 0);
}

TEST(CollectiveCost, NetworksThatCannotBe) {
  EXPECT_THROW_MESSAGE(halfSeconds(Algorithm::kRing, {0, {0, 1}}, 1), std::invalid_argument, "ranks = 0");
  EXPECT_THROW_MESSAGE(halfSeconds(Algorithm::kRing, {4, {0, 0}}, 1), std::invalid_argument, "bytes_per_second = 0");
  EXPECT_THROW_MESSAGE(halfSeconds(Algorithm::kRing, {4, {-1, 1}}, 1), std::invalid_argument, "latency_seconds = -1");
  EXPECT_THROW_MESSAGE(halfSeconds(Algorithm::kHalving, {6, {0, 1}}, 1), std::invalid_argument, "ranks = 6");
  EXPECT_THROW_MESSAGE(halfSeconds(Algorithm::kRing, {6, {0, 1}, 4}, 1), std::invalid_argument, "ranks_per_host = 4");
  EXPECT_THROW_MESSAGE(parseAlgorithm("tree"), std::invalid_argument, "\"tree\": allowed ring, direct");
  EXPECT_THROW_MESSAGE(scaledTable(CostTable({{1, 1}}), Operation::kRows, Algorithm::kRing, {1, {0, 1}}, {4, {0, 1}}),
                       std::invalid_argument, "ranks of the measured network = 1");
}

LinkModel measuredOn(const Network& network) {
  LinkModel link = straightLink(1, 1, network.ranks);
  link.network = network;
  link.transports.clear();
  for (const Algorithm algorithm : {Algorithm::kRing, Algorithm::kDirect, Algorithm::kHalving}) {
    std::vector<CostPoint> points;
    for (std::size_t bytes = 4096; bytes <= std::size_t{1} << 24U; bytes *= 4) {
      // Several senders a link cost a direct exchange of long messages something.
      const double worse = algorithm == Algorithm::kDirect && bytes > 131072 ? 2 : 1;
      points.push_back({bytes, worse * halfSeconds(algorithm, network, static_cast<double>(bytes))});
    }
    link.transports.push_back({algorithm, CostTable(points), CostTable(points)});
  }
  return link;
}

TEST(LinkModel, FindsATransportByItsName) {
  const LinkModel link = measuredOn({4, {1e-4, 1e8}});
  EXPECT_EQ(link.transport("halving").algorithm, Algorithm::kHalving);
  EXPECT_THROW_MESSAGE(link.transport("hierarchical"), std::invalid_argument, "allowed ring, direct, halving");
}

TEST(LinkModel, OnAnotherNetworkWhatDoesNotFitIsLeftOut) {
  const LinkModel link = measuredOn({4, {1e-4, 1e8}});
  EXPECT_EQ(link.on({6, {1e-4, 1e8}}).transports.size(), 2U);
  const LinkModel large = link.on({1024, {1e-4, 1e9}});
  EXPECT_EQ(large.transports.size(), 3U);
  EXPECT_NEAR(large.transports[0].all_gather.seconds(1U << 24U),
              halfSeconds(Algorithm::kRing, large.network, 1U << 24U), 1e-9);
  EXPECT_EQ(link.on(link.network).all_reduce.points(), link.all_reduce.points());
}

}  // namespace
}  // namespace torchext::core::testing
