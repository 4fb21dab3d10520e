#include "c10d/fault/group_health.h"

#include <unistd.h>

#include <algorithm>
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
constexpr auto kFaultMessageLimit = std::chrono::milliseconds(1000);
// How long it may take to find out who has not called a collective that timed out: well below what peers, whose
// connections this rank's timeout has closed, wait for the fault message.
constexpr std::chrono::milliseconds kLaggardLimit{400};

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
    : backendName_(std::move(backend_name)),
      rank_(rank),
      size_(size),
      creator_(getpid()),
      callbackThreads_([name = backendName_, rank] {
        LOG(WARNING)
            << name << " [rank " << rank << "]: " << CallbackThreads::kMost
            << " callbacks of futures are blocked, the most there may be; others wait until one of them returns";
      }) {}

void GroupHealth::setConnectionCloser(std::function<void()> closer) {
  std::unique_lock lock(mutex_);
  // What the old one refers to may go after this call.
  changed_.wait(lock, [this] { return !closing_; });
  closeConnections_ = std::move(closer);
}

void GroupHealth::setGroupName(const std::string& name) {
  std::lock_guard lock(mutex_);
  groupName_ = name;
}

std::string GroupHealth::label() const {
  std::lock_guard lock(mutex_);
  return c10::str(backendName_, " [rank ", rank_, " of ", size_, groupName_.empty() ? "" : ", group ", groupName_, "]");
}

std::string GroupHealth::describe(const OpInfo& op) const { return label() + ": " + nameOf(op) + detailsOf(op); }

bool GroupHealth::inForkedChild() const noexcept { return getpid() != creator_; }

std::pair<int, std::string> GroupHealth::firstReason() const {
  std::lock_guard lock(mutex_);
  return {reasonRank_, reason_};
}

std::set<int> GroupHealth::lostRanks() const {
  std::lock_guard lock(mutex_);
  return lost_;
}

std::exception_ptr GroupHealth::failureOf(const OpInfo& op) const {
  const auto text = failed() ? firstReason().second + kWayOut : kShutDown;
  return makeError(describe(op) + ": " + text);
}

void GroupHealth::checkProcess(const char* op) const {
  if (inForkedChild()) {
    C10_THROW_ERROR(DistBackendError,
                    c10::str(backendName_, " [rank ", rank_, " of ", size_, "]: ", op,
                             ": this group belongs to process ", creator_, " and cannot be used in its forked child ",
                             getpid(), "; create a group after the fork, or start processes by spawn"));
  }
}

void GroupHealth::checkUsable(const char* op) const {
  if (usable()) [[likely]] {
    return;
  }
  checkProcess(op);
  if (failed()) {
    std::rethrow_exception(failureOf({.name = op}));
  }
  C10_THROW_ERROR(DistBackendError, label() + ": " + op + ": " + kShutDown);
}

bool GroupHealth::setReason(FaultMessage::Kind kind, int rank, const std::string& reason) {
  std::lock_guard lock(mutex_);
  if (failed_.load()) {
    return false;
  }
  reasonRank_ = rank;
  reasonKind_ = kind;
  reason_ = core::cutReason(reason);
  if (kind == FaultMessage::Kind::kPeerDied || kind == FaultMessage::Kind::kDeparture) {
    lost_.insert(rank);
  }
  failed_.store(true, std::memory_order_release);
  changed_.notify_all();
  pending_.notify();
  return true;
}

bool GroupHealth::poison(int rank, const std::string& reason, std::chrono::milliseconds grace) {
  return fail(FaultMessage::Kind::kFailure, rank, reason, grace);
}

void GroupHealth::abort(const std::string& reason) {
  fail(FaultMessage::Kind::kAbort, rank_, reason, std::chrono::milliseconds(0));
}

bool GroupHealth::fail(FaultMessage::Kind kind, int rank, const std::string& reason, std::chrono::milliseconds grace) {
  if (inForkedChild()) {
    return false;
  }
  if (rank == rank_ && OrderlyExitScope::here()) {
    kind = FaultMessage::Kind::kDeparture;
  }
  const bool first = setReason(kind, rank, reason);
  if (first && monitor_) {
    monitor_->announce({kind, rank, rank_, reason});
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

void GroupHealth::noteLost(int rank) {
  std::lock_guard lock(mutex_);
  lost_.insert(rank);
}

std::chrono::milliseconds GroupHealth::remoteGrace() const {
  std::lock_guard lock(mutex_);
  return graceAfter(reasonKind_);
}

void GroupHealth::suspect(int rank, std::chrono::duration<double> silence, const core::Progress& last) {
  poison(rank, progress_.ofSilence(rank, silence, last, rank_));
}

void GroupHealth::timedOut(const OpInfo& op, const std::string& detail) {
  std::optional<core::LaggardQuery> answer;
  if (op.sequence > 0 && monitor_ && !failed()) {
    answer = monitor_->ask(op.sequence, kLaggardLimit);
  }
  const auto own = c10::str("rank ", rank_, " timed out in ", nameOf(op));
  if (answer && answer->laggard >= 0) {
    poison(answer->laggard, c10::str(GroupProgress::ofLaggard(*answer, op.name), "; ", own, ": ", detail),
           kRemoteGrace);
  } else {
    poison(rank_, c10::str(own, answer ? ", which every rank has called: " : ": ", detail), kRemoteGrace);
  }
}

void GroupHealth::expire() {
  if (const auto late = pending_.late()) {
    timedOut(*late, latenessOf(*late));
  }
}

void GroupHealth::noteStall(std::chrono::milliseconds patience) {
  const auto now = std::chrono::steady_clock::now();
  if (patience.count() == 0 || now < nextStallNotice_ || !usable() || !monitor_) {
    return;
  }
  const auto op = pending_.oldestCollective(stallNoted_);
  if (!op || now - op->since < patience) {
    return;
  }
  const auto answer = monitor_->ask(op->sequence, std::min(patience / 10, kLaggardLimit));
  if (!answer) {
    // It may have been late, or a rank is stopped, which the heartbeat finds: not to be kept from its clock.
    nextStallNotice_ = now + patience;
    return;
  }
  stallNoted_ = op->since;
  if (answer->laggard < 0 || failed()) {
    return;  // every rank has called it: a slow link, which is no fault
  }
  nextStallNotice_ = now + 12 * patience;
  LOG(WARNING) << label() << ": " << GroupProgress::ofLaggard(*answer, op->name) << "; rank " << rank_ << " called it "
               << secondsOf(now - op->since) << " ago, and waits on";
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
  poison(rank_, c10::str("rank ", rank_, " shut the group down while operations were under way"));
}

void GroupHealth::endPending(std::chrono::milliseconds grace) {
  pending_.waitUntilIdle(grace);
  pending_.interruptAll();
  runAbortCallbacks();
  // Taken only now: shutdown waits for who has taken it, and may be called by what has just run.
  std::unique_lock lock(mutex_);
  const auto closer = std::exchange(closeConnections_, nullptr);
  if (!closer) {
    return;
  }
  closing_ = true;
  lock.unlock();
  closer();
  lock.lock();
  closing_ = false;
  changed_.notify_all();
}

bool GroupHealth::waitForFaultMessage(std::chrono::milliseconds limit) {
  std::unique_lock lock(mutex_);
  // Once the successor has left in order nobody is watched, and no fault message comes.
  if (!monitor_ || monitor_->successorLeft()) {
    limit /= 5;
  }
  return changed_.wait_for(lock, limit, [this] { return failed_.load(); });
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
    if (timed_out) {
      timedOut(op, text);
    } else if (!waitForFaultMessage(kFaultMessageLimit)) {
      poison(rank_,
             c10::str("rank ", rank_, " lost its connections in ", nameOf(op), ": ", text,
                      op.peer >= 0 ? c10::str("; has rank ", op.peer, " left, or taken fewer steps?") : ""),
             kRemoteGrace);
    }
    const auto reason = firstReason().second;
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
    poison(rank_, c10::str("rank ", rank_, " failed in ", nameOf(op), ": ", *fault));
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

void GroupHealth::remove(PendingOperation* operation) noexcept { pending_.remove(operation); }

uint64_t GroupHealth::addAbortCallback(std::function<void()> callback) {
  {
    std::lock_guard lock(mutex_);
    if (!failed_) {
      callbacks_.emplace_back(nextCallback_, std::move(callback));
      return nextCallback_++;
    }
  }
  callback();
  return 0;
}

void GroupHealth::removeAbortCallback(uint64_t id) {
  decltype(callbacks_) removed;  // what they captured may end with them, without the lock
  std::unique_lock lock(mutex_);
  const auto found =
      std::find_if(callbacks_.begin(), callbacks_.end(), [id](const auto& entry) { return entry.first == id; });
  if (found != callbacks_.end()) {
    removed.splice(removed.end(), callbacks_, found);
  }
  // What it captured goes with the caller.
  changed_.wait(lock, [&] {
    const auto running = runningCallbacks_.find(id);
    return running == runningCallbacks_.end() || running->second == std::this_thread::get_id();
  });
}

void GroupHealth::runAbortCallbacks() {
  std::unique_lock lock(mutex_);
  while (!callbacks_.empty()) {
    auto [id, callback] = std::move(callbacks_.front());
    callbacks_.pop_front();
    runningCallbacks_.emplace(id, std::this_thread::get_id());
    lock.unlock();
    callback();
    callback = nullptr;  // what it captured may end with it
    lock.lock();
    runningCallbacks_.erase(id);
    changed_.notify_all();
  }
}

}  // namespace torchext
