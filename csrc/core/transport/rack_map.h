// RackMap says which hosts share a rack, told by a user or found from the bandwidth of their pairs. DS-Sync's
// topology-aware schedule (shuffle_schedule.h) and Prague's divisions (group_generator.h) go by it.
//
// A rack is a set of hosts that reach each other at the full speed of their links; between racks they share an uplink.
// Pure functions of values that are the same on all ranks, so every rank finds the same racks.
#pragma once

#include <cstdint>
#include <vector>

namespace torchext::core {

// In the terms of ShuffleOptions.
struct RackMap {
  std::vector<int> host_of = {};              // host_of[rank], dense
  std::vector<int> rack_of = {};              // rack_of[host], dense
  double host_bandwidth = 1.0;                // of a host's link
  std::vector<double> uplink_bandwidth = {};  // of each rack's uplink, the same unit

  int racks() const { return static_cast<int>(uplink_bandwidth.size()); }
  // Whether the racks tell links apart: there are several, and one of several hosts at least.
  bool dividesHosts() const { return racks() > 1 && racks() < static_cast<int>(rack_of.size()); }
  // rack_of_rank[rank].
  std::vector<int> rackOfRanks() const;
};

// From a user's numbers, one for each rank: equal numbers, one rack. Racks are counted in the order of their first
// ranks; a host with ranks in two racks counts as two hosts. All bandwidths are 1. std::invalid_argument unless both
// lists have the same length, 1 or more.
RackMap rackMapOf(const std::vector<int>& host_of, const std::vector<std::int64_t>& racks);

// bandwidth[a][b] = bandwidth[b][a]: of the pair of hosts, more than 0 where a != b. Hosts in the order of their best
// pair: each joins the rack to whose hosts it is connected best, if that is at least kSameRack of the best it has to
// anybody, and begins a rack otherwise. Pairs of different racks may be measured too low (several at a time share an
// uplink), those of one rack must not be. Returns rack_of, dense, in the order of the racks' first hosts.
std::vector<int> findRacks(const std::vector<std::vector<double>>& bandwidth);
inline constexpr double kSameRack = 0.6;

}  // namespace torchext::core
