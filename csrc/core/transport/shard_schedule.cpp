#include "core/transport/shard_schedule.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <numeric>

#include "core/base/check.h"

namespace torchext::core {
namespace {

// The ring of one side that a rank is in, and the parts that go around in it.
class SideRing {
 public:
  // first: of the places whose chunks the ranks of this ring share; stride: of neighbours, and of parts.
  SideRing(const RankGrid& grid, int place, int first, int side, int stride)
      : grid_(grid), place_(place), first_(first), side_(side), stride_(stride), own_(place / stride % side) {}

  int own() const { return own_; }
  int rank(int distance) const { return grid_.order[index(place_ + (wrapped(own_ + distance) - own_) * stride_)]; }
  // The chunks of the part that the rank at that distance keeps.
  std::vector<int> part(int distance) const {
    const auto begin = grid_.order.begin() + first_ + std::ptrdiff_t{wrapped(own_ + distance)} * stride_;
    std::vector<int> chunks(begin, begin + stride_);
    std::sort(chunks.begin(), chunks.end());
    return chunks;
  }

 private:
  int wrapped(int position) const { return (position % side_ + side_) % side_; }

  const RankGrid& grid_;
  int place_;
  int first_;
  int side_;
  int stride_;
  int own_;
};

// Rounds of a reduce-scatter in the order of sides; each side's own rounds by `add_rounds`.
template <class AddRounds>
void forEachSide(const RankGrid& grid, int rank, const AddRounds& add_rounds) {
  const auto found = std::find(grid.order.begin(), grid.order.end(), rank);
  if (found == grid.order.end()) {
    throwInvalid("rank", rank, concat("one of the ", grid.order.size(), " in the grid"));
  }
  const auto place = static_cast<int>(found - grid.order.begin());
  auto stride = static_cast<int>(grid.order.size());
  int first = 0;
  for (const int side : grid.sides) {
    stride /= side;
    const SideRing ring(grid, place, first, side, stride);
    add_rounds(ring, side);
    first += ring.own() * stride;
  }
}

}  // namespace

RankGrid ringGrid(int ranks) {
  checkPositive("ranks", ranks);
  RankGrid grid{.order = std::vector<int>(index(ranks)), .sides = {ranks}};
  std::iota(grid.order.begin(), grid.order.end(), 0);
  return grid;
}

RankGrid roomGrid(const std::vector<int>& room_of) {
  RankGrid grid = ringGrid(static_cast<int>(room_of.size()));
  std::stable_sort(grid.order.begin(), grid.order.end(),
                   [&](int a, int b) { return room_of[index(a)] < room_of[index(b)]; });
  std::map<int, int> sizes;
  for (const int room : room_of) {
    ++sizes[room];
  }
  const int side = sizes.begin()->second;
  const auto rooms = static_cast<int>(sizes.size());
  const bool equal = std::ranges::all_of(sizes, [&](const auto& room) { return room.second == side; });
  if (!equal || side == 1 || rooms == 1) {
    return grid;
  }
  const std::vector<int> by_room = grid.order;
  for (int place = 0; const int rank : by_room) {
    grid.order[index(place % side * rooms + place / side)] = rank;
    ++place;
  }
  grid.sides = {side, rooms};
  return grid;
}

std::vector<ShardRound> reduceScatterRounds(const RankGrid& grid, int rank) {
  std::vector<ShardRound> rounds;
  forEachSide(grid, rank, [&](const SideRing& ring, int side) {
    for (int round = 1; round < side; ++round) {
      rounds.push_back({ring.rank(1), ring.rank(-1), ring.part(-round), ring.part(-round - 1)});
    }
  });
  return rounds;
}

std::vector<ShardRound> allGatherRounds(const RankGrid& grid, int rank) {
  std::vector<ShardRound> rounds;
  forEachSide(grid, rank, [&](const SideRing& ring, int side) {
    for (int round = side - 2; round >= 0; --round) {  // to be reversed as a whole
      rounds.push_back({ring.rank(1), ring.rank(-1), ring.part(-round), ring.part(-round - 1)});
    }
  });
  std::ranges::reverse(rounds);
  return rounds;
}

std::vector<ShardRound> directReduceScatterRounds(int ranks, int rank) {
  std::vector<ShardRound> rounds;
  rounds.reserve(index(ranks));
  for (int distance = 1; distance < ranks; ++distance) {
    const int to = (rank + distance) % ranks;
    rounds.push_back({to, (rank - distance + ranks) % ranks, {to}, {rank}});
  }
  return rounds;
}

std::vector<ShardRound> directAllGatherRounds(int ranks, int rank) {
  std::vector<ShardRound> rounds = directReduceScatterRounds(ranks, rank);
  for (ShardRound& round : rounds) {
    round.sent = {rank};
    round.received = {round.from};
  }
  return rounds;
}

}  // namespace torchext::core
