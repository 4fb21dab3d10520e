// PendingOperations: the operations of one group that are under way, so that a failure or shutdown can end them.
//
// Collectives (DelegatingWork) and blocked waits are on the list from their call to their end. A failure is stored
// before interruptAll(), and add() looks for one with the list locked: so no operation is missed between the two.
//
// Threads: everything from any thread. The list owns nothing: who adds an operation removes it before it goes.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>

#include "c10d/fault/op_info.h"

namespace torchext {

// Something under way that a failure must end. Linked into the list while pending.
class PendingOperation {
 public:
  virtual ~PendingOperation() = default;

 protected:
  friend class PendingOperations;
  // Called with the list locked, so the object cannot vanish: must neither block nor call back into the list or the
  // group's health. Returns what remains to be done after the lock is released (may be empty).
  virtual std::function<void()> interrupt() = 0;

 private:
  OpInfo op_;
  std::chrono::steady_clock::time_point deadline_ = std::chrono::steady_clock::time_point::max();
  PendingOperation* next_ = nullptr;
  PendingOperation** link_ = nullptr;  // where this one is pointed to from; null when not linked
};

class PendingOperations {
 public:
  // Adds `operation`, unless the list is refused to it: `refused` is asked with the list locked. Returns whether it is
  // on the list.
  template <class Refused>
  bool add(PendingOperation* operation, const OpInfo& op, Refused refused) {
    std::lock_guard lock(mutex_);
    if (refused()) {
      return false;
    }
    link(operation, op);
    return true;
  }
  // Nothing happens if it is not on the list.
  void remove(PendingOperation* operation) noexcept;

  // One that has passed its limit.
  std::optional<OpInfo> late() const;
  // The collective called first of those called after `after`.
  std::optional<OpInfo> oldestCollective(std::chrono::steady_clock::time_point after) const;

  // Ends the waits of services (OpInfo::background).
  void interruptBackground();
  // Ends everything, and does what remains of it.
  void interruptAll();

  // Waits until nothing is pending but background waits, or until `enough`, for `limit` at most. Returns false then.
  bool waitUntilIdle(std::chrono::milliseconds limit, const std::function<bool()>& enough = {});
  // What `enough` looks at has changed.
  void notify();

 private:
  void link(PendingOperation* operation, const OpInfo& op);
  bool idle() const;  // with mutex_ held

  mutable std::mutex mutex_;  // guards the list, and the links of what is on it
  std::condition_variable changed_;
  PendingOperation* first_ = nullptr;
  int waiting_ = 0;  // threads in waitUntilIdle()
};

}  // namespace torchext
