// StallNotice says in the log which rank a collective has been waiting for. No failure: the rank lives, and may only be
// slow.
//
// Threads: one, which calls look().
#pragma once

#include <chrono>

#include "c10d/fault/group_health.h"

namespace torchext {

class StallNotice {
 public:
  // patience: how long a collective waits before it is told about; 0 is never.
  explicit StallNotice(std::chrono::milliseconds patience) : patience_(patience) {}

  // To be called now and then. Tells once about each collective that waits that long, and about one in twelve times
  // `patience` at most. Blocks for a tenth of `patience` at most.
  void look(const GroupHealth& health);

 private:
  const std::chrono::milliseconds patience_;
  std::chrono::steady_clock::time_point noted_{};  // when the last collective was called that it told about
  std::chrono::steady_clock::time_point next_{};
};

}  // namespace torchext
