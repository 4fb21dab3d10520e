// roomsOf() says which ranks are near each other: the rooms of dear's
// hierarchical transport (core::roomGrid).
#pragma once

#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "c10d/transport/point_to_point.h"

namespace torchext {

// Collective, for groups of tensors on the CPU. A number for each rank: that of
// its host where any host has several ranks, else that of its rack, measured
// (link_probe.h) where KnownRacks::worthMeasuring. Errors are those of the
// group and of the transport.
std::vector<int> roomsOf(const PointToPoint& transport, c10d::Backend& group);

}  // namespace torchext
