// ReentrancyGuard holds the engine's lock during a call, and refuses a call that comes from inside of another one.
//
// A wait runs Python's signal handlers on the thread that holds the lock. A handler may read counters or set an option
// there, for which it takes the lock alone; a step inside of a step throws c10::Error. Threads: any.
#pragma once

#include <mutex>

#include <c10/util/Exception.h>

namespace torchext {

struct EngineTurn {
  mutable std::recursive_mutex mutex;
  const char* inside = nullptr;  // the call whose turn it is
};

// The lock alone.
class EngineLock {
 public:
  explicit EngineLock(const EngineTurn& turn) : lock_(turn.mutex) {}

 private:
  std::lock_guard<std::recursive_mutex> lock_;
};

class ReentrancyGuard {
 public:
  ReentrancyGuard(EngineTurn& turn, const char* call) : turn_(turn), lock_(turn) {
    TORCH_CHECK(turn_.inside == nullptr, "torchext.optim: ", call, "() was called by a signal's handler while ",
                turn_.inside, "() waits for another rank; set a flag in the handler, and do it after the step");
    turn_.inside = call;
  }
  ~ReentrancyGuard() { turn_.inside = nullptr; }
  ReentrancyGuard(const ReentrancyGuard&) = delete;
  ReentrancyGuard& operator=(const ReentrancyGuard&) = delete;

 private:
  EngineTurn& turn_;
  EngineLock lock_;
};

}  // namespace torchext
