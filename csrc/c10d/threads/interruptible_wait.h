// Waits of the script's own thread, during which Python's signal handlers run.
//
// Python runs them between two of its instructions, on its main thread: one that waits in here for a peer which does
// not come would notice neither Ctrl-C nor the scheduler's word that the job is about to be stopped, up to the group's
// timeout. So that thread checks for signals a few times a second. On other threads, and without Python, these are
// plain waits.
//
// What a handler raises (KeyboardInterrupt) leaves the wait as a C++ exception, with the lock released. What was waited
// for goes on: only wait like this where nothing refers to the frames that an exception unwinds.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <future>
#include <mutex>

namespace torchext {

constexpr std::chrono::milliseconds kSignalCheckInterval{100};

// Runs the handlers of signals that have arrived, if this is the interpreter's main thread; throws what one raises.
void checkSignals();
// Called once, by the bindings.
void setSignalChecker(void (*checker)()) noexcept;

// Until `ready`; the caller's lock guards it.
template <class Ready>
void waitInterruptibly(std::condition_variable& changed, std::unique_lock<std::mutex>& lock, Ready ready) {
  while (!changed.wait_for(lock, kSignalCheckInterval, ready)) {
    lock.unlock();
    checkSignals();
    lock.lock();
  }
}

// The same, for `limit` at most: whether it is ready.
template <class Ready>
bool waitInterruptibly(std::condition_variable& changed, std::unique_lock<std::mutex>& lock,
                       std::chrono::steady_clock::time_point limit, Ready ready) {
  while (!changed.wait_until(lock, std::min(limit, std::chrono::steady_clock::now() + kSignalCheckInterval), ready)) {
    if (std::chrono::steady_clock::now() >= limit) {
      return false;
    }
    lock.unlock();
    checkSignals();
    lock.lock();
  }
  return true;
}

inline void waitInterruptibly(const std::shared_future<void>& future) {
  while (future.wait_for(kSignalCheckInterval) != std::future_status::ready) {
    checkSignals();
  }
}

}  // namespace torchext
