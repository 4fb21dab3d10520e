#include "core/base/host_map.h"

#include <algorithm>
#include <utility>

namespace torchext::core {

HostMap::HostMap(std::vector<int> host_of, int hosts)
    : host_of_(std::move(host_of)), local_rank_(host_of_.size()), ranks_of_(index(hosts)) {
  for (int rank = 0; rank < worldSize(); ++rank) {
    auto& ranks = ranks_of_[index(host_of_[index(rank)])];
    local_rank_[index(rank)] = static_cast<int>(ranks.size());
    ranks.push_back(rank);
  }
}

HostMap HostMap::singleHost(int world_size) {
  if (world_size < 1) {
    throwInvalid("world_size", world_size, "1 or more");
  }
  return HostMap(std::vector<int>(index(world_size), 0), 1);
}

HostMap HostMap::fromHostOf(const std::vector<int>& host_of, int world_size) {
  if (host_of.empty()) {
    return singleHost(world_size);
  }
  if (world_size < 1 || host_of.size() != index(world_size)) {
    throwInvalid("size of host_of", host_of.size(), concat("0 or world_size = ", world_size));
  }
  const auto [low, high] = std::minmax_element(host_of.begin(), host_of.end());
  if (*low < 0 || *high >= world_size) {
    throwInvalid("host_of", *low < 0 ? *low : *high, concat("host indices 0..", world_size - 1));
  }
  std::vector<bool> present(index(*high) + 1, false);
  for (const int host : host_of) {
    present[index(host)] = true;
  }
  const auto missing = std::find(present.begin(), present.end(), false);
  if (missing != present.end()) {
    throwInvalid("host_of", concat("indices up to ", *high),
                 concat("dense indices: no rank is on host ", missing - present.begin()));
  }
  return HostMap(host_of, *high + 1);
}

}  // namespace torchext::core
