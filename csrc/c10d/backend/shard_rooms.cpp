#include "c10d/backend/shard_rooms.h"

#include <algorithm>

#include "c10d/backend/known_racks.h"
#include "c10d/backend/link_probe.h"
#include "c10d/transport/hosts_of.h"

namespace torchext {

std::vector<int> roomsOf(const PointToPoint& transport, c10d::Backend& group) {
  std::vector<int> host_of = hostsOf(agreementGroup(group));
  const auto hosts = static_cast<std::size_t>(1 + *std::ranges::max_element(host_of));
  if (hosts < host_of.size() || !KnownRacks::worthMeasuring(host_of)) {
    return host_of;
  }
  return measureRacks(transport, group, host_of).rackOfRanks();
}

}  // namespace torchext
