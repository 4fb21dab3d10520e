// FirstReason holds why a group can no longer be used, and who has died: the first writer fixes the reason.
//
// Threads: everything from any thread.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <set>
#include <string>

#include "core/fault/fault_message.h"

namespace torchext {

class FirstReason {
 public:
  using Kind = core::FaultMessage::Kind;

  // Whom the reason is about (-1: nobody), and the text; empty while the group is well.
  struct Reason {
    int rank = -1;
    std::string text;
    bool operator==(const Reason&) const = default;
  };

  // Returns whether this was the first. A rank that died or left is among lostRanks() then.
  bool set(Kind kind, int rank, const std::string& text);
  bool isSet() const noexcept { return set_.load(std::memory_order_acquire); }
  Reason get() const;
  Kind kind() const;
  // Returns whether it is set, after `limit` at most.
  bool waitUntilSet(std::chrono::milliseconds limit) const;

  // Who has died, or leaves while others count on it, as far as this rank knows. The first reason does not settle that:
  // a rank that was silent for too long may be found dead afterwards.
  std::set<int> lostRanks() const;
  void noteLost(int rank);

 private:
  std::atomic<bool> set_{false};
  mutable std::mutex mutex_;  // guards what follows
  mutable std::condition_variable changed_;
  Kind kind_ = Kind::kFailure;
  Reason reason_;
  std::set<int> lost_;
};

}  // namespace torchext
