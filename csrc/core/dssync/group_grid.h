// GroupGrid makes rounds of groups over positions 0..size-1 that bring everybody's values to their mean: DS-Sync's grid
// (Wang et al., INFOCOM 2022, section IV). Private to csrc/core; shuffle_schedule.h puts ranks on the positions.
//
// Exact grid: size is a product of radices, position = mixed-radix number, round t groups the positions that differ in
// digit t mod rounds() only. Digit 0 is the lowest: round 0 groups consecutive positions. With frozen values all
// rounds() rounds give the exact mean: each averages one coordinate away.
//   radices  of all ways to write size as a product of numbers from 2 on, the one closest to group_size: the least sum
//            of log(radix / group_size)^2, then the fewest radices; larger radices first. size = group_size^p gives p
//            times group_size. One radix (everybody together) only where group_size reaches size.
//
// Dealt grid: for sizes that are no such product (primes, or a prime factor above kLargestRadix * group_size).
//   round t  cuts a list of the positions into near-equal consecutive parts (sizes differ by one at most, nobody is
//            alone). Before the next round the list is dealt into group_size piles, like cards, and the piles are put
//            on each other: members of one part go to different parts. For size = group_size^p that is the rotation of
//            the digits, so this is the exact grid with its edges worn; rounds() = least p >= 2 with
//            (size / parts)^p >= size.
//   contraction  one pass of rounds() rounds leaves at most a quarter of the variance of any start (11 positions in
//            groups of 4, the worst up to 211), most often a few percent; of a random start on average 3 % or less.
//
// Cost: construction O(size * rounds) for a dealt grid, the divisors of size for an exact one; groupOf O(group).
#pragma once

#include <cstdint>
#include <vector>

namespace torchext::core {

// An exact grid may have groups this many times larger than asked for; beyond that, near-equal groups cost less.
inline constexpr int kLargestRadix = 4;

// Near-equal groups that `size` is cut into: the number that brings their size closest to group_size. Two or more where
// group_size < size and size >= 4, and never so many that somebody is alone (unless size is 1).
int groupCount(int size, int group_size);

// Bounds of part `part` of `size` items cut into `parts`: [partBegin(part), partBegin(part + 1)).
int partBegin(int size, int parts, int part);
// The part that position is in.
int partOf(int size, int parts, int position);

class GroupGrid {
 public:
  // std::invalid_argument unless size >= 1 and group_size >= 2.
  GroupGrid(int size, int group_size);

  int size() const { return size_; }
  // Rounds after which the groups repeat, 1 or more.
  int rounds() const;
  // Radices of an exact grid, the lowest digit first (size 1: none); empty for a dealt one.
  const std::vector<int>& radices() const { return radices_; }
  bool exact() const { return orders_.empty(); }

  // Sorted positions of position's group. std::out_of_range on position, std::invalid_argument on a negative round.
  std::vector<int> groupOf(int position, std::int64_t round) const;

 private:
  int size_;
  int parts_ = 1;
  std::vector<int> radices_;
  std::vector<std::vector<int>> orders_;  // dealt: the list of each round
  std::vector<std::vector<int>> places_;  // dealt: where a position is in it
};

}  // namespace torchext::core
