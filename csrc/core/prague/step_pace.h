// StepPace: how long a worker's steps take, and from when on its training thread counts as being elsewhere.
#pragma once

#include <algorithm>
#include <chrono>
#include <optional>

namespace torchext::core {

class StepPace {
 public:
  using Duration = std::chrono::steady_clock::duration;
  using Time = std::chrono::steady_clock::time_point;

  // Before a second step nobody knows how long one takes; the first ones may compile.
  static constexpr std::chrono::milliseconds kUnknown{2000};
  static constexpr std::chrono::milliseconds kLeast{300};
  static constexpr int kSteps = 3;  // of the longest of late

  // A step has ended.
  void stepped(Time now) {
    if (last_) {
      // A pause counts like a long step, and is forgotten in some dozens of steps.
      longest_ = std::max(now - *last_, std::chrono::duration_cast<Duration>(longest_ * kForgets));
      known_ = true;
    }
    last_ = now;
  }

  // After a step: longer than the next one most likely takes.
  std::chrono::milliseconds patience() const {
    if (!known_) {
      return kUnknown;
    }
    return std::clamp(std::chrono::duration_cast<std::chrono::milliseconds>(kSteps * longest_), kLeast, kMost);
  }

 private:
  static constexpr double kForgets = 0.9;
  static constexpr std::chrono::milliseconds kMost = std::chrono::minutes(5);

  std::optional<Time> last_;
  Duration longest_{0};
  bool known_ = false;
};

}  // namespace torchext::core
