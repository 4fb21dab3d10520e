// ShuffleSchedule says who averages with whom at each step of DS-Sync (Wang et al., "DS-Sync: Addressing Network
// Bottlenecks with Divide-and-Shuffle Synchronization for Distributed DNN Training", INFOCOM 2022).
//
// An immutable value. Every rank builds it from equal options and computes its own group from (rank, step): no
// generator, no message. At each step the groups are disjoint and cover the world. The step is the optimizer step:
// whoever calls counts it, and saves it with its checkpoint. Threads: safe to read from many.
//
// Kinds
//   grid      the ranks on a grid whose sides are close to group_size; round t averages along coordinate t mod p. With
//             frozen values p rounds give the exact mean (n = group_size^p, and mixed sides: 12 = 4 x 3); of 4 x 4
//             random values the first round leaves 3/15 = 0.20 of the variance. World sizes that are no such product
//             (primes) get near-equal groups of a dealt grid, which contracts instead: group_grid.h has the rules and
//             the figures. Consecutive ranks meet first.
//   random    a seeded shuffle of all ranks at each step, cut into near-equal groups (sizes differ by one at most).
//             Nobody is alone unless the world is. On average one round leaves (groups - 1) / (n - 1) of the variance.
//   topology  rounds of a cycle: in_rack_rounds rounds inside racks, then one that crosses.
//             In a rack: the grid of the rack's ranks in the order of their hosts (consecutive ones first, so a host
//             of group_size ranks keeps its first round to itself). Nothing passes a rack's uplink. A rack of one rank
//             pauses.
//             Across: the racks on a grid whose sides are close to group_size; a group is all ranks of racks that
//             differ in one coordinate. Large groups on purpose: a ring that goes through its racks one by one passes
//             each uplink once, 2 S bytes however many ranks there are, where groups of one rank from each rack would
//             pass it once a rank. With racks of equal size and frozen values one cross round for each coordinate of
//             the racks' grid gives the exact mean.
//             in_rack_rounds: host_bandwidth / the slowest uplink's, rounded up, in 2..kMostInRackRounds, so that a
//             cycle spends about as long on the uplinks as inside the racks. One rack: no round crosses.
//
// Bytes (traffic): a group of g runs a ring in the order of its ranks; each member sends 2 (g - 1) / g S bytes to the
// next. On a host's or a rack's link counts what leaves it. Rings are short on uplinks where the ranks of a rack are
// consecutive.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/base/host_map.h"
#include "core/dssync/group_grid.h"

namespace torchext::core {

enum class ShuffleKind { kGrid, kRandom, kTopology };

// "grid", "random", "topology"; throws std::invalid_argument naming the choices.
ShuffleKind parseShuffleKind(const std::string& name);
const char* toString(ShuffleKind kind);

struct ShuffleOptions {
  int world_size = 1;                     // ranks, 1 or more
  int group_size = 2;                     // members a group aims for, 2..max(2, world_size)
  ShuffleKind kind = ShuffleKind::kGrid;  // see Kinds above
  std::uint64_t seed = 0;                 // random: equal seeds give equal groups, on every platform
  std::vector<int> host_of = {};          // host_of[rank] = dense host index; empty: one host. topology needs it
  std::vector<int> rack_of = {};          // rack_of[host] = dense rack index; empty: every host is a rack of its own
  double host_bandwidth = 1.0;            // of a host's link, any unit; more than 0
  std::vector<double> uplink_bandwidth = {};  // of each rack's uplink, same unit, more than 0; empty: as the hosts'
};

inline constexpr int kMostInRackRounds = 8;

// Bytes sent in one round.
struct RoundTraffic {
  std::vector<double> rank;    // by each rank: 2 (g - 1) / g S in a group of g
  std::vector<double> host;    // out of each host
  std::vector<double> uplink;  // out of each rack
};

class ShuffleSchedule {
 public:
  // std::invalid_argument with the name, the value and what is allowed.
  explicit ShuffleSchedule(ShuffleOptions options);

  // The sorted members of rank's group at step; {rank} when it averages with nobody.
  // std::out_of_range on rank, std::invalid_argument on a negative step. O(group), random: O(world).
  std::vector<int> groupOf(int rank, std::int64_t step) const;
  // All groups of a step, ordered by their first member.
  std::vector<std::vector<int>> groupsAt(std::int64_t step) const;

  // Steps after which the groups repeat; 0: never (random).
  std::int64_t period() const;
  // topology with several racks: rounds inside racks between two that cross; else 0.
  int inRackRounds() const { return in_rack_rounds_; }
  // True when the step crosses racks by plan (topology only).
  bool crosses(std::int64_t step) const;

  // payload: bytes that every rank averages, 0 or more.
  RoundTraffic traffic(std::int64_t step, double payload) const;

  const ShuffleOptions& options() const { return options_; }

 private:
  struct Rack {
    GroupGrid grid;
    std::vector<int> ranks;  // by host, then by rank: the position in the grid
  };

  std::vector<int> randomGroup(int rank, std::int64_t step) const;
  std::vector<int> inRackGroup(int rank, std::int64_t round) const;
  std::vector<int> crossGroup(int rank, std::int64_t round) const;

  ShuffleOptions options_;
  HostMap hosts_;
  HostMap racks_;   // of hosts: "rank" is a host there
  GroupGrid grid_;  // grid: of the ranks; topology: of the racks
  std::vector<Rack> members_;
  std::vector<int> position_;  // of each rank in its rack's grid
  int in_rack_rounds_ = 0;
  std::uint64_t random_key_ = 0;
};

}  // namespace torchext::core
