// FailureCallbacks runs what other parts asked for when their group fails, and then closes the group's connections.
//
// Threads: everything from any thread. Callbacks run one after the other on the thread that calls run(), without a
// lock; a second thread in run() takes those that the first has not reached.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "c10d/fault/first_reason.h"

namespace torchext {

class FailureCallbacks {
 public:
  // reason: is set before run() is called; outlives this object.
  explicit FailureCallbacks(const FirstReason& reason) : reason_(reason) {}

  // The callback runs once. Returns an id for removal. Called at once if the group has failed already.
  std::uint64_t add(std::function<void()> callback);
  // Afterwards it does not run any more: waits for one that does, but not for itself.
  void remove(std::uint64_t id);
  // closer: closes the connections of the inner groups, so that what is pending inside them ends; must not throw.
  // Waits for the one before where it runs: what that refers to may go after this call.
  void setConnectionCloser(std::function<void()> closer);

  // The callbacks, then the closer, each once.
  void run();

 private:
  const FirstReason& reason_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::list<std::pair<std::uint64_t, std::function<void()>>> callbacks_;
  std::uint64_t next_ = 1;
  std::map<std::uint64_t, std::thread::id> running_;
  std::function<void()> closeConnections_;
  bool closing_ = false;  // closeConnections_ was taken and runs
};

}  // namespace torchext
