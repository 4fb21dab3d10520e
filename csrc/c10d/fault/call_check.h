// CallCheck: no two ranks exchange data of different collectives.
//
// Gloo checks nothing: of two ranks that reduce different sizes one is aborted, and different dtypes of equal size, or
// different reductions, give wrong numbers silently.
//
// How
//   Every rank notes the header of every collective (call_header.h) in its ledger, which predicts the next one
//   (core/fault/call_ledger.h says why that suffices). A call that was predicted starts at once: the check sends no
//   message. One that was not, or comes while such a one waits, starts on this object's thread, in order:
//     1. The header goes to the predecessor, on the monitor's ring. If that rank's own call of this number differs, or
//        will, it says so: the group fails with both calls named. This is what reaches a rank that has started.
//     2. By log2(size) rounds with peers at growing distances (a dissemination barrier over the control group) every
//        rank learns that every other has come to this call, with the same header. Then it starts.
//   Nobody's caller is blocked: the work it has is that of a call still to start.
//
// What it leaves: ranks whose call was predicted may have begun when another turns out to differ; they never complete
// with a wrong result, but what is reduced in place may hold part of a sum, as after every failed collective.
// CallCheck::Mode::kEvery asks before every call and leaves every buffer as it was. Equal headers in another order
// cannot be told apart: two all_reduce of the same shape and dtype, exchanged on one rank. Mode::kLines, which asks
// before every call as well, compares the lines of the script that make the calls (call_site.h) and finds these, but
// for a loop that goes through its tensors in another order, always on one line.
//
// Waits end with the group's timeout, by GroupHealth's limit and not by one inside Gloo.
//
// Threads: record() and startLater() from the threads that call collectives, received() from the monitor's, the rest
// from any. Owned by shared_ptr: a call that is about to start may outlive the backend.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "c10d/fault/group_health.h"
#include "c10d/threads/task_thread.h"
#include "core/fault/call_ledger.h"

namespace torchext {

class CallCheck : public std::enable_shared_from_this<CallCheck> {
 public:
  enum class Mode { kNew, kEvery, kLines };

  // A call that does not start at once.
  struct Ticket {
    std::uint64_t number = 0;
    core::CallHeader header;
    bool agree = false;  // first; else it only keeps its turn
  };

  CallCheck(std::shared_ptr<GroupHealth> health, std::shared_ptr<FailureMonitor> monitor,
            c10::intrusive_ptr<c10d::Backend> control, Mode mode);
  ~CallCheck();  // stop()
  CallCheck(const CallCheck&) = delete;
  CallCheck& operator=(const CallCheck&) = delete;

  // Before record(): until fewer calls wait to start than the ledger can keep apart. What a signal's handler raises
  // leaves it, and no call has been made.
  void awaitRoom();
  // Notes the next call. Nothing: start it now. Otherwise hand the ticket to startLater(), whatever other threads do
  // meanwhile: calls behind it wait for that.
  std::optional<Ticket> record(core::CallHeader header);
  // Runs `start` on this object's thread, in the order of the calls, once the ranks agree; with the error if they do
  // not. It may be destroyed without having run.
  // op.limit: the group's timeout.
  void startLater(const Ticket& ticket, const OpInfo& op, std::function<void(const std::exception_ptr&)> start);
  // The successor's header, from its ring message.
  void received(const core::CallMessage& message);
  // Waits until all calls have started, or the group has failed; a signal interrupts it.
  void drain();
  // Drops what has not started. After the group was closed or failed.
  void stop() noexcept;

 private:
  void agree(const Ticket& ticket, OpInfo op);
  void disagree(const Ticket& ticket, const core::CallMessage& its);
  void differ(std::uint64_t number, const core::CallHeader& own, int peer, const core::CallHeader& its);

  const std::shared_ptr<GroupHealth> health_;
  const std::shared_ptr<FailureMonitor> monitor_;
  c10::intrusive_ptr<c10d::Backend> control_;
  const int rank_;
  const int size_;
  const Mode mode_;
  std::uint64_t failure_callback_ = 0;

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  core::CallLedger ledger_;
  std::optional<core::CallMessage> early_;  // of a call that is not made here yet
  std::uint64_t waiting_ = 0;               // calls that have not started
  // By number, those of which the thread does not know yet; empty between record() and startLater().
  std::map<std::uint64_t, std::function<void()>> turns_;
  bool failed_ = false;
  std::unique_ptr<TaskThread> thread_;  // null after stop()
};

}  // namespace torchext
