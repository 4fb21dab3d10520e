#include "core/base/host_map.h"

#include <gtest/gtest.h>

#include <stdexcept>

#include "expect_throw.h"

namespace torchext::core {
namespace {

TEST(HostMap, RanksOfAHostAreInOrder) {
  const auto hosts = HostMap::fromHostOf({0, 1, 0, 2, 1, 0}, 6);
  EXPECT_EQ(hosts.worldSize(), 6);
  EXPECT_EQ(hosts.hostCount(), 3);
  EXPECT_EQ(hosts.hostOf(), (std::vector<int>{0, 1, 0, 2, 1, 0}));
  EXPECT_EQ(hosts.ranksOf(0), (std::vector<int>{0, 2, 5}));
  EXPECT_EQ(hosts.ranksOf(1), (std::vector<int>{1, 4}));
  EXPECT_EQ(hosts.localRank(5), 2);
  EXPECT_EQ(hosts.localRank(3), 0);
  EXPECT_EQ(hosts.hostOf(4), 1);
}

TEST(HostMap, NoHostIndicesMeansOneHost) {
  const auto hosts = HostMap::fromHostOf({}, 3);
  EXPECT_EQ(hosts.hostCount(), 1);
  EXPECT_EQ(hosts.ranksOf(0), (std::vector<int>{0, 1, 2}));
}

TEST(HostMap, RoundTripsThroughHostOf) {
  const auto hosts = HostMap::fromHostOf({1, 0, 1}, 3);
  EXPECT_EQ(hosts.ranksOf(1), (std::vector<int>{0, 2}));
  EXPECT_EQ(HostMap::fromHostOf(hosts.hostOf(), 3).ranksOf(0), (std::vector<int>{1}));
}

TEST(HostMap, BadInputNamesValueAndRange) {
  EXPECT_THROW_MESSAGE(HostMap::singleHost(0), std::invalid_argument, "world_size = 0: allowed 1 or more");
  EXPECT_THROW_MESSAGE(HostMap::fromHostOf({0, 1}, 3), std::invalid_argument, "size of host_of = 2");
  EXPECT_THROW_MESSAGE(HostMap::fromHostOf({0, -1}, 2), std::invalid_argument,
                       "host_of = -1: allowed host indices 0..1");
  EXPECT_THROW_MESSAGE(HostMap::fromHostOf({0, 2, 2}, 3), std::invalid_argument, "no rank is on host 1");
  const auto hosts = HostMap::singleHost(2);
  EXPECT_THROW_MESSAGE(static_cast<void>(hosts.hostOf(2)), std::out_of_range, "rank = 2: allowed 0..1");
  EXPECT_THROW_MESSAGE(static_cast<void>(hosts.localRank(-1)), std::out_of_range, "rank = -1");
  EXPECT_THROW_MESSAGE(static_cast<void>(hosts.ranksOf(1)), std::out_of_range, "host = 1: allowed 0..0");
}

}  // namespace
}  // namespace torchext::core
