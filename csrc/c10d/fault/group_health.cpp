#include "c10d/fault/group_health.h"

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <c10/util/StringUtil.h>

#include "c10d/fault/explain_error.h"
#include "c10d/fault/orderly_exit_scope.h"

namespace torchext {
namespace {

std::chrono::milliseconds graceAfter(FaultMessage::Kind kind) {
  return kind == FaultMessage::Kind::kAbort ? std::chrono::milliseconds(0) : GroupHealth::kRemoteGrace;
}

constexpr const char* kShutDown = "the group was shut down (destroy_process_group)";

}  // namespace

GroupHealth::GroupHealth(std::string backend_name, int rank, int size)
    : identity_(std::move(backend_name), rank, size), callbackThreads_([name = identity_.backendName(), rank] {
        LOG(WARNING)
            << name << " [rank " << rank << "]: " << CallbackThreads::kMost
            << " callbacks of futures are blocked, the most there may be; others wait until one of them returns";
      }) {}

std::exception_ptr GroupHealth::failureOf(const OpInfo& op) const {
  const auto text = failed() ? reason_.get().text + kWayOut : kShutDown;
  return distError(describe(op) + ": " + text);
}

void GroupHealth::checkUsable(const char* op) const {
  if (usable()) [[likely]] {
    return;
  }
  identity_.checkProcess(op);
  if (failed()) {
    std::rethrow_exception(failureOf({.name = op}));
  }
  C10_THROW_ERROR(DistBackendError, label() + ": " + op + ": " + kShutDown);
}

bool GroupHealth::setReason(FaultMessage::Kind kind, int rank, const std::string& reason) {
  const bool first = reason_.set(kind, rank, reason);
  if (first) {
    pending_.notify();
  }
  return first;
}

bool GroupHealth::poison(int rank, const std::string& reason, std::chrono::milliseconds grace) {
  return fail(FaultMessage::Kind::kFailure, rank, reason, grace);
}

void GroupHealth::abort(const std::string& reason) {
  fail(FaultMessage::Kind::kAbort, identity_.rank(), reason, std::chrono::milliseconds(0));
}

bool GroupHealth::fail(FaultMessage::Kind kind, int rank, const std::string& reason, std::chrono::milliseconds grace) {
  if (inForkedChild()) {
    return false;
  }
  if (rank == identity_.rank() && OrderlyExitScope::here()) {
    kind = FaultMessage::Kind::kDeparture;
  }
  const bool first = setReason(kind, rank, reason);
  if (first && monitor_) {
    monitor_->announce({kind, rank, identity_.rank(), reason});
  }
  // Who was not the first but wants an end at once (abort) gets it; otherwise the first one's grace stands.
  if (first || grace.count() == 0) {
    endPending(grace);
  }
  return first;
}

void GroupHealth::receive(const FaultMessage& fault) {
  const auto reason = fault.kind == FaultMessage::Kind::kPeerDied
                          ? c10::str("rank ", fault.rank, " died (", fault.reason, ")")
                          : fault.reason;
  setReason(fault.kind, fault.rank, reason);
  endPending(graceAfter(fault.kind));
}

std::chrono::milliseconds GroupHealth::remoteGrace() const { return graceAfter(reason_.kind()); }

void GroupHealth::expire() {
  if (const auto late = pending_.late()) {
    reportTimeout(*this, *late, latenessOf(*late));
  }
}

void GroupHealth::close(std::chrono::milliseconds grace) {
  if (inForkedChild()) {
    return;
  }
  closed_.store(true);
  pending_.interruptBackground();
  if (pending_.waitUntilIdle(grace, [this] { return failed(); }) && !failed()) {
    return;
  }
  poison(identity_.rank(), c10::str("rank ", identity_.rank(), " shut the group down while operations were under way"));
}

void GroupHealth::endPending(std::chrono::milliseconds grace) {
  pending_.waitUntilIdle(grace);
  pending_.interruptAll();
  onFailure_.run();
}

void GroupHealth::add(PendingOperation* operation, const OpInfo& op) {
  if (inForkedChild()) {
    checkUsable(op.name);
  }
  if (pending_.add(operation, op, [&] { return failed() || (closed_ && !op.nested); })) {
    return;
  }
  if (failed()) {
    std::rethrow_exception(failureOf(op));  // with the call's number and sizes, which a name alone does not have
  }
  checkUsable(op.name);
}

}  // namespace torchext
