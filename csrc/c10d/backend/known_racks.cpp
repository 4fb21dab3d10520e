#include "c10d/backend/known_racks.h"

#include <algorithm>
#include <utility>

#include "c10d/backend/link_probe.h"

namespace torchext {

bool KnownRacks::worthMeasuring(const std::vector<int>& host_of) {
  const int hosts = host_of.empty() ? 0 : 1 + *std::max_element(host_of.begin(), host_of.end());
  return hosts >= kFewestHosts && hosts <= kMostHosts;
}

core::RackMap KnownRacks::measure(AttachableBackend& group, const std::vector<int>& host_of) {
  if (const auto known = get()) {
    return *known;
  }
  core::RackMap map = measureRacks(group.dataTransport(), group, host_of);
  set(map);
  return map;
}

void KnownRacks::set(core::RackMap map) {
  const std::lock_guard<std::mutex> lock(mutex_);
  map_ = std::move(map);
}

std::optional<core::RackMap> KnownRacks::get() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return map_;
}

}  // namespace torchext
