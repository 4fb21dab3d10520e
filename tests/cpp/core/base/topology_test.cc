#include "core/base/topology.h"

#include <gtest/gtest.h>

#include <stdexcept>

#include "expect_throw.h"

namespace torchext::core {
namespace {

TEST(Topology, RanksOfAHostAreInOrder) {
  const auto topology = Topology::fromHostOf({0, 1, 0, 2, 1, 0}, 6);
  EXPECT_EQ(topology.worldSize(), 6);
  EXPECT_EQ(topology.hostCount(), 3);
  EXPECT_EQ(topology.hostOf(), (std::vector<int>{0, 1, 0, 2, 1, 0}));
  EXPECT_EQ(topology.ranksOf(0), (std::vector<int>{0, 2, 5}));
  EXPECT_EQ(topology.ranksOf(1), (std::vector<int>{1, 4}));
  EXPECT_EQ(topology.localRank(5), 2);
  EXPECT_EQ(topology.localRank(3), 0);
  EXPECT_EQ(topology.hostOf(4), 1);
}

TEST(Topology, NoHostIndicesMeansOneHost) {
  const auto topology = Topology::fromHostOf({}, 3);
  EXPECT_EQ(topology.hostCount(), 1);
  EXPECT_EQ(topology.ranksOf(0), (std::vector<int>{0, 1, 2}));
}

TEST(Topology, RoundTripsThroughHostOf) {
  const auto topology = Topology::fromHostOf({1, 0, 1}, 3);
  EXPECT_EQ(topology.ranksOf(1), (std::vector<int>{0, 2}));
  EXPECT_EQ(Topology::fromHostOf(topology.hostOf(), 3).ranksOf(0), (std::vector<int>{1}));
}

TEST(Topology, BadInputNamesValueAndRange) {
  EXPECT_THROW_MESSAGE(Topology::singleHost(0), std::invalid_argument, "world_size = 0: allowed 1 or more");
  EXPECT_THROW_MESSAGE(Topology::fromHostOf({0, 1}, 3), std::invalid_argument, "size of host_of = 2");
  EXPECT_THROW_MESSAGE(Topology::fromHostOf({0, -1}, 2), std::invalid_argument,
                       "host_of = -1: allowed host indices 0..1");
  EXPECT_THROW_MESSAGE(Topology::fromHostOf({0, 2, 2}, 3), std::invalid_argument, "no rank is on host 1");
  const auto topology = Topology::singleHost(2);
  EXPECT_THROW_MESSAGE(static_cast<void>(topology.hostOf(2)), std::out_of_range, "rank = 2: allowed 0..1");
  EXPECT_THROW_MESSAGE(static_cast<void>(topology.localRank(-1)), std::out_of_range, "rank = -1");
  EXPECT_THROW_MESSAGE(static_cast<void>(topology.ranksOf(1)), std::out_of_range, "host = 1: allowed 0..0");
}

}  // namespace
}  // namespace torchext::core
