#include "c10d/fault/group_health.h"

#include <optional>

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <c10/util/StringUtil.h>

#include "c10d/fault/connection_error.h"
#include "c10d/fault/local_error.h"
#include "c10d/fault/orderly_exit_scope.h"

namespace torchext {
namespace {

// How long a failed operation waits to learn from the monitor who died.
constexpr std::chrono::milliseconds kFaultMessageLimit{1000};
constexpr std::chrono::milliseconds kUnwatchedLimit{200};

std::chrono::milliseconds graceAfter(FaultMessage::Kind kind) {
  return kind == FaultMessage::Kind::kAbort ? std::chrono::milliseconds(0) : GroupHealth::kRemoteGrace;
}

constexpr const char* kWayOut =
    "; this group cannot be used any more: destroy_process_group() and initialize again, or let torchrun "
    "--max-restarts restart the job";
constexpr const char* kShutDown = "the group was shut down (destroy_process_group)";

std::exception_ptr makeError(std::string text) {
  return std::make_exception_ptr(
      c10::DistBackendError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, std::move(text)));
}

}  // namespace

GroupHealth::GroupHealth(std::string backend_name, int rank, int size)
    : identity_(std::move(backend_name), rank, size), callbackThreads_([name = identity_.backendName(), rank] {
        LOG(WARNING)
            << name << " [rank " << rank << "]: " << CallbackThreads::kMost
            << " callbacks of futures are blocked, the most there may be; others wait until one of them returns";
      }) {}

std::exception_ptr GroupHealth::failureOf(const OpInfo& op) const {
  const auto text = failed() ? reason_.get().text + kWayOut : kShutDown;
  return makeError(describe(op) + ": " + text);
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

std::exception_ptr GroupHealth::refuse(const OpInfo& op, const std::string& error) {
  poison(op.peer, c10::str("rank ", op.peer, " sent a malformed message: ", error));
  return failureOf(op);
}

void GroupHealth::receive(const FaultMessage& fault) {
  const auto reason = fault.kind == FaultMessage::Kind::kPeerDied
                          ? c10::str("rank ", fault.rank, " died (", fault.reason, ")")
                          : fault.reason;
  setReason(fault.kind, fault.rank, reason);
  endPending(graceAfter(fault.kind));
}

std::chrono::milliseconds GroupHealth::remoteGrace() const { return graceAfter(reason_.kind()); }

void GroupHealth::timedOut(const OpInfo& op, const std::string& detail) {
  std::optional<core::LaggardQuery> answer;
  if (op.sequence > 0 && monitor_ && !failed()) {
    answer = monitor_->ask(op.sequence, kLaggardLimit);
  }
  const auto own = c10::str("rank ", identity_.rank(), " timed out in ", nameOf(op));
  if (answer && answer->laggard >= 0) {
    poison(answer->laggard, c10::str(GroupProgress::ofLaggard(*answer, op.name), "; ", own, ": ", detail),
           kRemoteGrace);
  } else {
    poison(identity_.rank(), c10::str(own, answer ? ", which every rank has called: " : ": ", detail), kRemoteGrace);
  }
}

void GroupHealth::expire() {
  if (const auto late = pending_.late()) {
    timedOut(*late, latenessOf(*late));
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

std::exception_ptr GroupHealth::explain(const std::exception_ptr& error, const OpInfo& op) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::DistBackendError&) {
    return error;
  } catch (const std::exception& inner) {
    if (!isConnectionError(inner)) {
      return error;
    }
    const std::string text = shortened(inner.what());
    const bool timed_out = contains(text, "Timed out");
    // Once the successor has left in order nobody is watched, and no fault message comes.
    const bool watched = monitor_ && !monitor_->successorLeft();
    if (timed_out) {
      timedOut(op, text);
    } else if (!reason_.waitUntilSet(watched ? kFaultMessageLimit : kUnwatchedLimit)) {
      poison(identity_.rank(),
             c10::str("rank ", identity_.rank(), " lost its connections in ", nameOf(op), ": ", text,
                      op.peer >= 0 ? c10::str("; has rank ", op.peer, " left, or taken fewer steps?") : ""),
             kRemoteGrace);
    }
    const auto reason = reason_.get().text;
    return makeError(c10::str(describe(op), ": ", reason, contains(reason, text) ? "" : "; seen here as: ",
                              contains(reason, text) ? "" : text, kWayOut));
  } catch (...) {
    return error;
  }
}

std::exception_ptr GroupHealth::explainToAll(const std::exception_ptr& error, const OpInfo& op) {
  std::exception_ptr explained = explain(error, op);
  if (const auto fault = localError(explained); fault && !failed()) {
    // Whether or not the script ends: this rank exchanges no more, and others may train on.
    const OrderlyExitScope orderly_exit;
    poison(identity_.rank(), c10::str("rank ", identity_.rank(), " failed in ", nameOf(op), ": ", *fault));
  }
  return explained;
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
