// roundRobinPartner() lets everybody meet everybody once, in rounds of pairs: the circle method of tournaments.
//
// One position stands still, the others turn around it. An even number of positions needs size - 1 rounds, an odd one
// size, in each of which one position has nobody. Pure functions.
#pragma once

#include "core/base/check.h"

namespace torchext::core {

// 0 for one position.
inline int roundRobinRounds(int size) { return size < 2 ? 0 : size - 1 + size % 2; }

// Whom `position` meets in `round`, -1: nobody. std::out_of_range on either.
inline int roundRobinPartner(int size, int round, int position) {
  checkIndex("position", position, size);
  checkIndex("round", round, roundRobinRounds(size));
  const int turning = roundRobinRounds(size);  // positions that turn; the last of an even number stands still
  const auto partner_of = [&](int place) { return ((2 * round - place) % turning + turning) % turning; };
  if (position == turning) {
    return round;  // whose partner would be itself
  }
  const int partner = partner_of(position);
  if (partner != position) {
    return partner;
  }
  return size % 2 == 0 ? turning : -1;
}

}  // namespace torchext::core
