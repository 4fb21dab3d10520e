// Prague's static schedule: every worker computes its group from (rank, step), with no generator and no message
// (Luo et al., ASPLOS 2020, section 5.4).
//
// A pure function: all ranks that pass the same (step, world_size, host_of) get groups that are disjoint and cover the
// world, so nobody has to tell anybody. Every rank must count its steps alike; one that skips a step must not call
// later.
#pragma once

#include <cstdint>
#include <vector>

namespace torchext::core {

// Steps after which the schedule repeats, for every map of hosts.
inline constexpr std::int64_t kStaticPeriod = 4;

// The sorted members of rank's group at step; {rank} when it averages with nobody. Period 4 for hosts of 4 workers:
//   0: local rank 0 of all hosts together, 1 alone, (2, 3) together     1: the whole host
//   2: (0, 3) inside the host, local rank 1 of all hosts together, 2 alone     3: the whole host
// Hosts of another size generalize it: at even steps one local rank joins its peers of all hosts (0 and 1 take turns),
// the others, counted cyclically from the one after it, pair up inside their host; of an odd number the first stays
// alone. With one host the even steps pair neighbours instead ((0, 1), (2, 3) ... then (1, 2), (3, 4) ...; three
// together when the number is odd), so that every step mixes. host_of[rank] = dense host index; empty: one host.
// group_size caps no group here: the schedule fixes the sizes. Throws std::out_of_range on rank, std::invalid_argument
// on a negative step, world_size below 1 or a host_of that is not dense (see host_map.h). Cost: one pass over host_of.
std::vector<int> staticGroup(int rank, std::int64_t step, int world_size, const std::vector<int>& host_of);

}  // namespace torchext::core
