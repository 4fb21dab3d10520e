// LinkModel is what calibration knows of a network: a table for each operation, and the straight line beside them.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/auto/collective_cost.h"

namespace torchext::core {

// One way of moving a bucket's two halves.
struct Transport {
  Algorithm algorithm = Algorithm::kRing;
  CostTable reduce_scatter;  // of the whole buffer's bytes
  CostTable all_gather;
};

struct LinkModel {
  Network network;                    // link: of point-to-point
  CostTable all_reduce;               // the group's own, whose algorithm is taken for a ring
  std::vector<Transport> transports;  // those that exist and were measured; none: dear is no candidate
  std::optional<CostTable> rows;      // of one rank's bytes; without it there are no factor layers
  double copy_bytes_per_second = 0;   // into a flat buffer, or out of it; 0: not measured, and free
  double operations_per_second = 0;   // of a matrix product; 0: not measured, and free

  // std::invalid_argument naming those that were measured.
  const Transport& transport(const std::string& algorithm) const;
  // The same network with other ranks or links (scaledTable); transports that do not fit it are left out.
  LinkModel on(const Network& other) const;
};

}  // namespace torchext::core
