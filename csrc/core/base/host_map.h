// HostMap says which rank is on which host.
//
// A HostMap is an immutable value, built once from host indices that are equal on all ranks; every later question is a
// look-up. Hosts need not have equal sizes, and the ranks of a host need not be consecutive. Threads: safe to read from
// many.
#pragma once

#include <vector>

#include "core/base/check.h"

namespace torchext::core {

class HostMap {
 public:
  // All ranks on one host. std::invalid_argument unless world_size is 1 or more.
  static HostMap singleHost(int world_size);

  // host_of[rank]: dense host indices in any order; empty: one host.
  // std::invalid_argument when the size is not world_size, an index is negative, or 0..max leaves out an index.
  static HostMap fromHostOf(const std::vector<int>& host_of, int world_size);

  int worldSize() const { return static_cast<int>(host_of_.size()); }
  int hostCount() const { return static_cast<int>(ranks_of_.size()); }

  // The following throw std::out_of_range on a rank or host that does not exist.
  int hostOf(int rank) const {
    checkIndex("rank", rank, worldSize());
    return host_of_[index(rank)];
  }
  // Position of rank among the ranks of its host, which are in ascending order.
  int localRank(int rank) const {
    checkIndex("rank", rank, worldSize());
    return local_rank_[index(rank)];
  }
  const std::vector<int>& ranksOf(int host) const {
    checkIndex("host", host, hostCount());
    return ranks_of_[index(host)];
  }
  // host index of every rank: what GeneratorOptions::host_of takes.
  const std::vector<int>& hostOf() const { return host_of_; }

 private:
  HostMap(std::vector<int> host_of, int hosts);

  std::vector<int> host_of_;
  std::vector<int> local_rank_;
  std::vector<std::vector<int>> ranks_of_;
};

}  // namespace torchext::core
