// Measures the network between the hosts of a group: the racks that DS-Sync's topology-aware schedule goes by.
//
// One rank of each host takes part. In rounds of disjoint pairs (round_robin.h) a pair sends messages that grow
// until the fastest of a few takes kProbeTime, which tells its bandwidth whatever the link's. Pairs of one rack do not
// disturb each other; those that share an uplink do, which makes them look slower: core::findRacks needs no more. Then
// one host of each rack measures against one of each other rack, again in disjoint pairs: that is the uplinks'
// bandwidth. Links are taken to be as fast one way as the other. Costs (hosts + racks) rounds of some six kProbeTime.
#pragma once

#include <chrono>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "c10d/transport/point_to_point.h"
#include "core/transport/rack_map.h"

namespace torchext {

inline constexpr std::chrono::milliseconds kProbeTime{20};

// Collective. group: of the transport's ranks, for tensors on the CPU. host_of[rank]: dense host index. The same result
// on every rank, bandwidths in bytes a second. Errors are those of the transport and of the group.
core::RackMap measureRacks(const PointToPoint& transport, c10d::Backend& group, const std::vector<int>& host_of);

}  // namespace torchext
