// YieldingMutex guards an object whose calls may block: a call lets go of the lock while it does, and the next call
// waits until it is over. Meanwhile others can look at what the lock guards.
//
// Threads: everything from any. Waits look at signals (interruptible_wait.h).
#pragma once

#include <condition_variable>
#include <mutex>
#include <thread>

#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include "c10d/threads/interruptible_wait.h"

namespace torchext {

class YieldingMutex {
 public:
  using Lock = std::unique_lock<std::mutex>;

  // For a call: when no other is blocked in the middle.
  // Throws where this very thread is, for a signal's handler runs in its wait. what: of the error.
  Lock enter(const char* what) {
    Lock lock(mutex_);
    TORCH_CHECK(blocked_ != std::this_thread::get_id(), what);
    waitInterruptibly(over_, lock, [this] { return blocked_ == std::thread::id(); });
    return lock;
  }
  // For a look, also in the middle of a call.
  Lock look() { return Lock(mutex_); }
  // Runs what blocks, inside a call, without the lock.
  template <class Blocking>
  void without(Lock& lock, const Blocking& blocking) {
    blocked_ = std::this_thread::get_id();
    lock.unlock();
    const auto again = c10::make_scope_exit([&] {
      lock.lock();
      blocked_ = std::thread::id();
      over_.notify_all();
    });
    blocking();
  }

 private:
  std::mutex mutex_;  // guards what follows, too
  std::condition_variable over_;
  std::thread::id blocked_;  // in a call; none: nobody is
};

}  // namespace torchext
