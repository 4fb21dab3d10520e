// GroupHealth says whether a group can be used, and ends what is under way when it cannot any more.
//
// What it holds
//   the first reason why the group can no longer be used       first_reason.h
//   the operations that are under way                          pending_operations.h
//   callbacks of other parts that block on something else      failure_callbacks.h
//   the group's name, and the process it belongs to            group_label.h
//   where this rank is in the group's collectives              group_progress.h
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

#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <string>

#include "c10d/fault/failure_callbacks.h"
#include "c10d/fault/failure_monitor.h"
#include "c10d/fault/first_reason.h"
#include "c10d/fault/group_label.h"
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
  // How long it may take to find out who has not called a collective that timed out: well below what peers, whose
  // connections this rank's timeout has closed, wait for the fault message.
  static constexpr std::chrono::milliseconds kLaggardLimit{400};

  GroupHealth(std::string backend_name, int rank, int size);

  // Set once by the backend, before any call.
  void setMonitor(std::shared_ptr<FailureMonitor> monitor) { monitor_ = std::move(monitor); }
  const std::shared_ptr<FailureMonitor>& monitor() const { return monitor_; }

  GroupLabel& identity() { return identity_; }
  const GroupLabel& identity() const { return identity_; }
  std::string label() const { return identity_.text(); }
  std::string describe(const OpInfo& op) const { return identity_.describe(op); }
  bool inForkedChild() const noexcept { return identity_.inForkedChild(); }
  void checkProcess(const char* op) const { identity_.checkProcess(op); }

  FirstReason& reason() { return reason_; }
  const FirstReason& reason() const { return reason_; }
  FailureCallbacks& onFailure() { return onFailure_; }
  // Where this rank is in the collectives of the group.
  GroupProgress& progress() { return progress_; }
  const PendingOperations& pending() const { return pending_; }
  // Where the callbacks of the futures of its calls run.
  CallbackThreads& callbacks() { return callbackThreads_; }

  bool usable() const noexcept { return !failed() && !closed_ && !inForkedChild(); }
  bool failed() const noexcept { return reason_.isSet(); }
  // Throws DistBackendError if the group failed, was shut down, or belongs to the parent process.
  void checkUsable(const char* op) const;

  // Ends the group's use. Only the first call has an effect on the reason; returns whether this was it.
  // rank: whom it is about, -1 if nobody; on a thread that leaves (orderly_exit_scope.h) this rank is one that is lost.
  // grace: how long operations under way may still finish by themselves.
  bool poison(int rank, const std::string& reason, std::chrono::milliseconds grace = std::chrono::milliseconds(0));
  // The same about this rank, whose script wants an end at once, here and at the others: no grace anywhere.
  void abort(const std::string& reason);
  // The same for a fault message that came by the monitor, which passes it on itself.
  void receive(const FaultMessage& fault);
  // What of kRemoteGrace the first reason leaves.
  std::chrono::milliseconds remoteGrace() const;
  // To be called now and then, by one thread: fails the group if an operation has passed its limit.
  void expire();
  // From now on every call throws. Operations under way get `grace`, then the group is poisoned.
  void close(std::chrono::milliseconds grace);

  // The error of an operation that a failure has ended, or shutdown.
  std::exception_ptr failureOf(const OpInfo& op) const;

  // Operations under way. add() throws like checkUsable when the group is not usable.
  void add(PendingOperation* operation, const OpInfo& op);
  void remove(PendingOperation* operation) noexcept { pending_.remove(operation); }

 private:
  bool fail(FaultMessage::Kind kind, int rank, const std::string& reason, std::chrono::milliseconds grace);
  bool setReason(FaultMessage::Kind kind, int rank, const std::string& reason);
  void endPending(std::chrono::milliseconds grace);

  GroupLabel identity_;
  FirstReason reason_;
  FailureCallbacks onFailure_{reason_};
  std::shared_ptr<FailureMonitor> monitor_;
  GroupProgress progress_;
  PendingOperations pending_;
  CallbackThreads callbackThreads_;
  std::atomic<bool> closed_{false};
};

}  // namespace torchext
