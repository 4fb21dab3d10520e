// Elapsed: milliseconds of the steady clock, in which all synchronizers' stats count.
#pragma once

#include <chrono>

namespace torchext {

using Clock = std::chrono::steady_clock;

inline double milliseconds(Clock::duration duration) {
  return std::chrono::duration<double, std::milli>(duration).count();
}

inline double millisecondsSince(Clock::time_point start) { return milliseconds(Clock::now() - start); }

}  // namespace torchext
