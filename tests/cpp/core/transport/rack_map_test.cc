#include "core/transport/rack_map.h"

#include <gtest/gtest.h>

#include <set>
#include <stdexcept>
#include <utility>

#include "core/base/random.h"
#include "core/dssync/round_robin.h"
#include "tests/cpp/core/base/expect_throw.h"

namespace torchext::core {
namespace {

using Matrix = std::vector<std::vector<double>>;

TEST(RoundRobin, EverybodyMeetsEverybodyOnceInDisjointPairs) {
  for (int size = 1; size <= 17; ++size) {
    std::set<std::pair<int, int>> met;
    EXPECT_EQ(roundRobinRounds(size), size < 2 ? 0 : (size % 2 == 0 ? size - 1 : size));
    for (int round = 0; round < roundRobinRounds(size); ++round) {
      int idle = 0;
      for (int position = 0; position < size; ++position) {
        const int partner = roundRobinPartner(size, round, position);
        if (partner < 0) {
          ++idle;
          continue;
        }
        ASSERT_NE(partner, position);
        ASSERT_LT(partner, size);
        EXPECT_EQ(roundRobinPartner(size, round, partner), position) << size << " " << round << " " << position;
        met.emplace(std::min(position, partner), std::max(position, partner));
      }
      EXPECT_EQ(idle, size % 2);
    }
    EXPECT_EQ(met.size(), static_cast<std::size_t>(size * (size - 1) / 2));
  }
  EXPECT_THROW_MESSAGE(roundRobinPartner(4, 3, 0), std::out_of_range, "round = 3: allowed 0..2");
  EXPECT_THROW_MESSAGE(roundRobinPartner(4, 0, 4), std::out_of_range, "position = 4: allowed 0..3");
}

TEST(RackMap, OfAUsersNumbers) {
  const RackMap map = rackMapOf({0, 0, 1, 1, 2, 2}, {7, 7, 7, 7, -3, -3});
  EXPECT_EQ(map.host_of, (std::vector<int>{0, 0, 1, 1, 2, 2}));
  EXPECT_EQ(map.rack_of, (std::vector<int>{0, 0, 1}));
  EXPECT_EQ(map.uplink_bandwidth, (std::vector<double>{1.0, 1.0}));
  EXPECT_EQ(map.racks(), 2);
}

TEST(RackMap, AHostInTwoRacksIsTwoHosts) {
  const RackMap map = rackMapOf({0, 0, 0, 0}, {1, 0, 1, 0});
  EXPECT_EQ(map.host_of, (std::vector<int>{0, 1, 0, 1}));
  EXPECT_EQ(map.rack_of, (std::vector<int>{0, 1}));
}

TEST(RackMap, AnEntryForEachRank) {
  EXPECT_THROW_MESSAGE(rackMapOf({0, 1, 2}, {0, 1}), std::invalid_argument,
                       "size of racks = 2: allowed the number of ranks = 3");
  EXPECT_THROW_MESSAGE(rackMapOf({}, {}), std::invalid_argument, "size of racks = 0");
}

// Hosts of `rack_of` with links of `link` each; between racks `uplink`, shared by `sharing` pairs at a time.
Matrix network(const std::vector<int>& rack_of, const std::vector<double>& link, double uplink, Random& random) {
  Matrix result(rack_of.size(), std::vector<double>(rack_of.size()));
  for (std::size_t a = 0; a < rack_of.size(); ++a) {
    for (std::size_t b = a + 1; b < rack_of.size(); ++b) {
      double speed = std::min(link[a], link[b]);
      if (rack_of[a] != rack_of[b]) {
        speed = std::min(speed, uplink / static_cast<double>(1 + random.below(4)));
      }
      speed *= 0.85 + 0.15 * random.uniform();
      result[a][b] = result[b][a] = speed;
    }
  }
  return result;
}

TEST(FindRacks, NoisyNetworksOfAllSizes) {
  Random random(3);
  for (int trial = 0; trial < 300; ++trial) {
    std::vector<int> rack_of;
    const auto racks = 1 + random.below(4);
    for (std::uint64_t rack = 0; rack < racks; ++rack) {
      rack_of.insert(rack_of.end(), 2 + random.below(4), static_cast<int>(rack));
    }
    const std::vector<double> link(rack_of.size(), 1e9);
    EXPECT_EQ(findRacks(network(rack_of, link, 4e8, random)), rack_of) << "trial " << trial;
  }
}

TEST(FindRacks, ASlowHostDoesNotJoinTwoRacks) {
  Random random(5);
  const std::vector<int> rack_of{0, 0, 0, 1, 1, 1};
  for (std::size_t slow = 0; slow < rack_of.size(); ++slow) {
    std::vector<double> link(rack_of.size(), 1e9);
    link[slow] = 1.5e8;  // less than the uplink
    const std::vector<int> found = findRacks(network(rack_of, link, 2e8, random));
    for (std::size_t a = 0; a < rack_of.size(); ++a) {
      for (std::size_t b = 0; b < rack_of.size(); ++b) {
        if (a != slow && b != slow) {
          EXPECT_EQ(found[a] == found[b], rack_of[a] == rack_of[b]) << "slow " << slow << ": " << a << ", " << b;
        }
      }
    }
  }
}

TEST(FindRacks, OneHostAndUniformNetworks) {
  EXPECT_EQ(findRacks({{0.0}}), std::vector<int>{0});
  Random random(7);
  const std::vector<int> one_rack(7, 0);
  EXPECT_EQ(findRacks(network(one_rack, std::vector<double>(7, 1e8), 1.0, random)), one_rack);
}

TEST(FindRacks, BadInputNamesValueAndRange) {
  EXPECT_THROW_MESSAGE(findRacks({{0.0, 1.0}}), std::invalid_argument, "size of a row of bandwidth = 2: allowed 1");
  EXPECT_THROW_MESSAGE(findRacks({{0.0, 0.0}, {0.0, 0.0}}), std::invalid_argument, "hosts 0 and 1");
  EXPECT_THROW_MESSAGE(findRacks({{0.0, 2.0}, {1.0, 0.0}}), std::invalid_argument, "the same both ways");
}

}  // namespace
}  // namespace torchext::core
