// Prague's static schedule: every worker computes its group from (rank, step), with no generator and no message
// (Luo et al., ASPLOS 2020, section 5.4).
#pragma once

#include <cstdint>
#include <vector>

namespace torchext::core {

// The sorted members of rank's group at step; {rank} when it averages with nobody. Period 4 for hosts of 4 workers:
//   0: local rank 0 of all hosts together, 1 alone, (2, 3) together     1: the whole host
//   2: (0, 3) inside the host, local rank 1 of all hosts together, 2 alone     3: the whole host
// Hosts of another size generalize it: at even steps one rotating local rank joins its peers of all hosts, the others
// pair up inside their host. With one host the "all hosts" round pairs ranks instead, so that every step mixes.
// host_of[rank] = dense host index; empty: one host. group_size caps no group here: the schedule fixes the sizes.
std::vector<int> staticGroup(int rank, std::int64_t step, int world_size, const std::vector<int>& host_of);

}  // namespace torchext::core
