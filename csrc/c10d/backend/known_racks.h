// KnownRacks keeps which rank of a group is in which rack, from the user or measured (link_probe.h) in the first call.
//
// Threads: from any; measure() is collective.
#pragma once

#include <mutex>
#include <optional>
#include <vector>

#include "c10d/backend/attachable_backend.h"
#include "core/transport/rack_map.h"

namespace torchext {

class KnownRacks {
 public:
  // Hosts between which a default may spend (hosts + racks) rounds of some 120 ms on measuring: two have one link, and
  // a hundred would take a quarter of a minute.
  static constexpr int kFewestHosts = 3;
  static constexpr int kMostHosts = 64;

  // host_of[rank]: dense host index.
  static bool worthMeasuring(const std::vector<int>& host_of);

  core::RackMap measure(AttachableBackend& group, const std::vector<int>& host_of);
  void set(core::RackMap map);
  // Empty before the first of these calls.
  std::optional<core::RackMap> get() const;

 private:
  mutable std::mutex mutex_;  // guards what follows
  std::optional<core::RackMap> map_;
};

}  // namespace torchext
