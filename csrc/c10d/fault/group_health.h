// GroupHealth: the fault state that a DelegatingBackend shares with its works and its monitor.
//
// What it holds
//   * the first reason why the group can no longer be used (the first writer fixes it), shutdown, and the fork guard;
//   * the operations that are under way, so that a failure can end them (pending_operations.h);
//   * callbacks of other parts that block on something else and want to be told.
//
// Life of a failure
//   poison() stores the reason, tells the peers through the monitor, gives operations under way a grace period (their
//   inner work may already hold all its data: a peer that exits right after the last all_reduce is no failure of it),
//   ends what is left, runs the callbacks, and closes the inner connections. The callbacks of futures, the user's, run
//   on threads of their own (callback_threads.h), and may shut the group down meanwhile: who does closes the
//   connections first, or waits for the thread that is at it.
//
// Threads: everything from any thread. Owned by shared_ptr: works may outlive their backend.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "c10d/fault/failure_monitor.h"
#include "c10d/fault/group_progress.h"
#include "c10d/fault/op_info.h"
#include "c10d/fault/pending_operations.h"
#include "c10d/threads/callback_threads.h"

namespace torchext {

class GroupHealth : public std::enable_shared_from_this<GroupHealth> {
 public:
  // How long operations under way may finish by themselves after a peer's end was reported. After its abort() they may
  // not at all.
  static constexpr std::chrono::milliseconds kRemoteGrace{400};

  GroupHealth(std::string backend_name, int rank, int size);

  // Set once by the backend, before any call.
  void setMonitor(std::shared_ptr<FailureMonitor> monitor) { monitor_ = std::move(monitor); }
  // closer: closes the connections of the inner groups, so that what is pending inside them ends; must not throw.
  void setConnectionCloser(std::function<void()> closer);
  void setGroupName(const std::string& name);

  // Where this rank is in the collectives of the group.
  GroupProgress& progress() { return progress_; }
  // Where the callbacks of the futures of its calls run.
  CallbackThreads& callbacks() { return callbackThreads_; }

  // "prague [rank 2 of 4, group default]"
  std::string label() const;
  // label() and the call: "prague [...]: all_reduce #17 (sum, float32, 10 elements; 0.4 s after the call)"
  std::string describe(const OpInfo& op) const;

  bool usable() const noexcept { return !failed_.load(std::memory_order_acquire) && !closed_ && !inForkedChild(); }
  bool failed() const noexcept { return failed_.load(std::memory_order_acquire); }
  bool inForkedChild() const noexcept;
  // The first reason and the rank it is about (-1: none); empty while the group is well.
  std::pair<int, std::string> firstReason() const;
  // Who has died, or leaves while others count on it, as far as this rank knows. The first reason does not settle that:
  // a rank that was silent for too long may be found dead afterwards.
  std::set<int> lostRanks() const;
  // Throws DistBackendError if the group failed, was shut down, or belongs to the parent process.
  void checkUsable(const char* op) const;
  // The part of it that concerns a forked child.
  void checkProcess(const char* op) const;

  // Ends the group's use. Only the first call has an effect on the reason; returns whether this was it.
  // rank: whom it is about, -1 if nobody; on a thread that leaves (orderly_exit_scope.h) this rank is one that is lost.
  // grace: how long operations under way may still finish by themselves.
  bool poison(int rank, const std::string& reason, std::chrono::milliseconds grace = std::chrono::milliseconds(0));
  // The same about this rank, whose script wants an end at once, here and at the others: no grace anywhere.
  void abort(const std::string& reason);
  // The same for a fault message that came by the monitor, which passes it on itself.
  void receive(const FaultMessage& fault);
  // The monitor has seen a death after the first reason, which stays.
  void noteLost(int rank);
  // What of kRemoteGrace the first reason leaves.
  std::chrono::milliseconds remoteGrace() const;
  // The successor was silent for too long: names it, and says where it was.
  void suspect(int rank, std::chrono::duration<double> silence, const core::Progress& last);
  // To be called now and then, by one thread: fails the group if an operation has passed its limit.
  void expire();
  // Likewise: says in the log which rank a collective has been waiting for, once for each that waits that long, and for
  // one in twelve times `patience` at most. No failure: the rank lives, and may only be slow. Blocks for a tenth of
  // `patience` at most. patience: 0 is never.
  void noteStall(std::chrono::milliseconds patience);
  // From now on every call throws. Operations under way get `grace`, then the group is poisoned.
  void close(std::chrono::milliseconds grace);

  // Turns an error of an inner backend into the one to show: errors of connections name the rank that died (waiting up
  // to a second for the fault message) and poison the group; others keep their text.
  std::exception_ptr explain(const std::exception_ptr& error, const OpInfo& op);
  // The same of what the other ranks wait for, whoever calls it: with an error that is local (local_error.h) this rank
  // leaves the group, and the others know why.
  std::exception_ptr explainToAll(const std::exception_ptr& error, const OpInfo& op);
  // op.peer sent what no torchext of this version sends: poisons the group and returns the call's error.
  std::exception_ptr refuse(const OpInfo& op, const std::string& error);
  // The error of an operation that a failure has ended, or shutdown.
  std::exception_ptr failureOf(const OpInfo& op) const;

  // Operations under way. add() throws like checkUsable when the group is not usable.
  void add(PendingOperation* operation, const OpInfo& op);
  void remove(PendingOperation* operation) noexcept;

  // Waits for a point-to-point work of an inner group such that a failure ends the wait.
  // timeout: 0 is that which the inner group connected with. Throws DistBackendError; see explain().
  void waitPointToPoint(const c10::intrusive_ptr<c10d::Work>& work, std::chrono::milliseconds timeout,
                        const OpInfo& op);

  // The same for what is no work of an inner group: asks `look` until it is true, for kLook at a time. `look` may block
  // that long. timeout: 0 is none.
  void waitUntil(const std::function<bool(std::chrono::milliseconds limit)>& look, std::chrono::milliseconds timeout,
                 const OpInfo& op);
  static constexpr std::chrono::milliseconds kLook{20};

  // Callbacks that a failure or abort runs once, on the thread that found it. Returns an id for removal. Called at once
  // if the group has failed already.
  uint64_t addAbortCallback(std::function<void()> callback);
  // Afterwards it does not run any more: waits for one that does, but not for itself.
  void removeAbortCallback(uint64_t id);

 private:
  bool fail(FaultMessage::Kind kind, int rank, const std::string& reason, std::chrono::milliseconds grace);
  bool setReason(FaultMessage::Kind kind, int rank, const std::string& reason);
  void endPending(std::chrono::milliseconds grace);
  void runAbortCallbacks();
  bool waitForFaultMessage(std::chrono::milliseconds limit);
  void timedOut(const OpInfo& op, const std::string& detail);
  [[noreturn]] void throwInterrupted(const OpInfo& op) const;

  const std::string backendName_;
  const int rank_;
  const int size_;
  const pid_t creator_;
  std::shared_ptr<FailureMonitor> monitor_;
  GroupProgress progress_;
  PendingOperations pending_;
  CallbackThreads callbackThreads_;

  std::atomic<bool> failed_{false};
  std::atomic<bool> closed_{false};
  // Of the clock's thread.
  std::chrono::steady_clock::time_point stallNoted_{};  // when the last collective was called that it told about
  std::chrono::steady_clock::time_point nextStallNotice_{};

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::string groupName_;
  std::string reason_;
  int reasonRank_ = -1;
  FaultMessage::Kind reasonKind_ = FaultMessage::Kind::kFailure;
  std::set<int> lost_;
  std::function<void()> closeConnections_;
  bool closing_ = false;  // closeConnections_ was taken and runs
  std::list<std::pair<uint64_t, std::function<void()>>> callbacks_;
  uint64_t nextCallback_ = 1;
  std::map<uint64_t, std::thread::id> runningCallbacks_;
};

}  // namespace torchext
