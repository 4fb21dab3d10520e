#include "c10d/group_health.h"

#include <unistd.h>

#include <iomanip>
#include <optional>
#include <sstream>
#include <string_view>
#include <vector>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include "c10d/collective_header.h"
#include "c10d/connection_error.h"
#include "c10d/leaving.h"

namespace torchext {
namespace {

// How long a failed operation waits to learn from the monitor who died.
constexpr auto kVerdictLimit = std::chrono::milliseconds(1000);
// How long it may take to find out who has not called a collective that timed out: well below what peers, whose
// connections this rank's timeout has closed, wait for the verdict.
constexpr auto kLaggardLimit = std::chrono::milliseconds(400);

constexpr const char* kWayOut =
    "; this group cannot be used any more: destroy_process_group() and initialize again, or let torchrun "
    "--max-restarts restart the job";
constexpr const char* kShutDown = "the group was shut down (destroy_process_group)";

std::exception_ptr makeError(std::string text) {
  return std::make_exception_ptr(
      c10::DistBackendError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, std::move(text)));
}

// "all_reduce #17", "send with rank 2"
std::string nameOf(const OpInfo& op) {
  return c10::str(op.name, op.sequence > 0 ? c10::str(" #", op.sequence) : "",
                  op.peer >= 0 ? c10::str(" with rank ", op.peer) : "");
}

// " (sum, float32, 10 elements; 0.4 s after the call)"
std::string detailsOf(const OpInfo& op) {
  if (!op.header) {
    return "";
  }
  const auto arguments = argumentsOf(*op.header);
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - op.since;
  std::ostringstream text;
  text << " (" << arguments << (arguments.empty() ? "" : "; ") << std::fixed << std::setprecision(1) << elapsed.count()
       << " s after the call)";
  return text.str();
}

// What an operation that has passed its limit was waiting for.
std::string lateness(const OpInfo& op) {
  if (op.nested) {
    return c10::str("Timed out waiting ", op.limit.count(), "ms for all ranks to call it");
  }
  return op.header ? c10::str("not complete after its operation_timeout of ", op.limit.count(), "ms")
                   : c10::str("nothing came for ", op.limit.count(), " ms; is a rank stuck, or training fewer steps?");
}

// A blocked point-to-point wait, on the stack of the waiting thread.
class PointToPointWait final : public PendingOperation {
 public:
  explicit PointToPointWait(c10d::Work& work) : work_(work) {}

 protected:
  std::function<void()> interrupt() override {
    work_.abort();  // sets a flag of the buffer and signals; also right when the wait has not begun yet
    return {};
  }

 private:
  c10d::Work& work_;
};

// A wait that looks at itself now and then.
class LookingWait final : public PendingOperation {
 public:
  bool interrupted() const { return interrupted_; }

 protected:
  std::function<void()> interrupt() override {
    interrupted_ = true;
    return {};
  }

 private:
  std::atomic<bool> interrupted_{false};
};

}  // namespace

GroupHealth::GroupHealth(std::string backend_name, int rank, int size)
    : backendName_(std::move(backend_name)), rank_(rank), size_(size), creator_(getpid()) {}

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

void GroupHealth::tellStep(int model, std::uint32_t meeting, std::int64_t steps) noexcept {
  if (monitor_) {
    monitor_->tell({.model = model, .meeting = meeting, .steps = steps});
  }
}

std::int64_t GroupHealth::furthestStep(int model, std::uint32_t meeting) const {
  const auto told = monitor_ ? monitor_->furthest(model) : std::nullopt;
  return told && told->meeting == meeting ? told->steps : 0;
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

int GroupHealth::lostRank() const {
  std::lock_guard lock(mutex_);
  return reasonIsLoss_ ? reasonRank_ : -1;
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

bool GroupHealth::setReason(Verdict::Kind kind, int rank, const std::string& reason) {
  std::lock_guard lock(mutex_);
  if (failed_.load()) {
    return false;
  }
  reasonRank_ = rank;
  reasonIsLoss_ = kind == Verdict::Kind::kObituary || kind == Verdict::Kind::kDeparture;
  reason_ = core::cutReason(reason);
  failed_.store(true, std::memory_order_release);
  changed_.notify_all();
  return true;
}

bool GroupHealth::poison(int rank, const std::string& reason, std::chrono::milliseconds grace) {
  if (inForkedChild()) {
    return false;
  }
  const auto kind = rank == rank_ && Leaving::here() ? Verdict::Kind::kDeparture : Verdict::Kind::kAbort;
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

void GroupHealth::receive(const Verdict& verdict) {
  const auto reason = verdict.kind == Verdict::Kind::kObituary
                          ? c10::str("rank ", verdict.rank, " died (", verdict.reason, ")")
                          : verdict.reason;
  setReason(verdict.kind, verdict.rank, reason);
  endPending(kRemoteGrace);
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
  std::optional<OpInfo> late;
  {
    const auto now = std::chrono::steady_clock::now();
    std::lock_guard lock(mutex_);
    for (auto* operation = pending_; operation != nullptr && !late; operation = operation->next_) {
      if (operation->deadline_ <= now) {
        late = operation->op_;
      }
    }
  }
  if (late) {
    timedOut(*late, lateness(*late));
  }
}

void GroupHealth::close(std::chrono::milliseconds grace) {
  if (inForkedChild()) {
    return;
  }
  closed_.store(true);
  std::unique_lock lock(mutex_);
  for (auto* operation = pending_; operation != nullptr; operation = operation->next_) {
    if (operation->op_.background) {
      operation->interrupt();
    }
  }
  if (changed_.wait_for(lock, grace, [this] { return idle() || failed_; }) && !failed_) {
    return;
  }
  lock.unlock();
  poison(rank_, c10::str("rank ", rank_, " shut the group down while operations were under way"));
}

bool GroupHealth::idle() const {
  const auto* operation = pending_;
  while (operation != nullptr && operation->op_.background) {
    operation = operation->next_;
  }
  return operation == nullptr;
}

void GroupHealth::endPending(std::chrono::milliseconds grace) {
  std::vector<std::function<void()>> remaining;
  {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, grace, [this] { return idle(); });
    for (auto* operation = pending_; operation != nullptr; operation = operation->next_) {
      if (auto rest = operation->interrupt()) {
        remaining.push_back(std::move(rest));
      }
    }
  }
  for (const auto& rest : remaining) {
    rest();
  }
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

bool GroupHealth::waitForVerdict(std::chrono::milliseconds limit) {
  std::unique_lock lock(mutex_);
  // Once the successor has left in order nobody is watched, and no verdict comes.
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
    } else if (!waitForVerdict(kVerdictLimit)) {
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

void GroupHealth::add(PendingOperation* operation, const OpInfo& op) {
  if (inForkedChild()) {
    checkUsable(op.name);
  }
  std::unique_lock lock(mutex_);
  if (failed_ || (closed_ && !op.nested)) {
    lock.unlock();
    if (failed()) {
      std::rethrow_exception(failureOf(op));  // with the call's number and sizes, which a name alone does not have
    }
    checkUsable(op.name);
  }
  operation->op_ = op;
  if (op.limit.count() > 0) {
    operation->deadline_ = std::chrono::steady_clock::now() + op.limit;
  }
  operation->next_ = pending_;
  if (pending_) {
    pending_->link_ = &operation->next_;
  }
  operation->link_ = &pending_;
  pending_ = operation;
}

void GroupHealth::remove(PendingOperation* operation) noexcept {
  std::lock_guard lock(mutex_);
  if (!operation->link_) {
    return;
  }
  *operation->link_ = operation->next_;
  if (operation->next_) {
    operation->next_->link_ = operation->link_;
  }
  operation->link_ = nullptr;
  operation->next_ = nullptr;
  if (closed_ || failed_) {
    changed_.notify_all();
  }
}

void GroupHealth::waitPointToPoint(const c10::intrusive_ptr<c10d::Work>& work, std::chrono::milliseconds timeout,
                                   const OpInfo& op) {
  PointToPointWait node(*work);
  add(&node, op);
  bool arrived = false;
  try {
    arrived = work->wait(timeout == kNoTimeout && op.background ? FailureMonitor::kForever : timeout);
    remove(&node);
  } catch (...) {
    remove(&node);
    std::rethrow_exception(explain(std::current_exception(), op));
  }
  if (!arrived) {
    throwInterrupted(op);
  }
}

void GroupHealth::waitUntil(const std::function<bool(std::chrono::milliseconds limit)>& look,
                            std::chrono::milliseconds timeout, const OpInfo& op) {
  LookingWait node;
  add(&node, op);
  const auto begin = std::chrono::steady_clock::now();
  bool arrived = false;
  bool late = false;
  while (!arrived && !late && !node.interrupted()) {
    arrived = look(kLook);
    late = !arrived && timeout.count() > 0 && std::chrono::steady_clock::now() - begin >= timeout;
  }
  remove(&node);
  if (arrived) {
    return;
  }
  if (late) {
    // As Gloo says it.
    const std::runtime_error error(c10::str("Timed out waiting ", timeout.count(), "ms for ", nameOf(op)));
    std::rethrow_exception(explain(std::make_exception_ptr(error), op));
  }
  throwInterrupted(op);
}

void GroupHealth::throwInterrupted(const OpInfo& op) const {
  if (failed()) {
    std::rethrow_exception(failureOf(op));
  }
  C10_THROW_ERROR(DistBackendError, describe(op) + ": the wait was ended by shutdown");
}

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
  std::unique_lock lock(mutex_);
  callbacks_.remove_if([id](const auto& entry) { return entry.first == id; });
  // What it captured goes with the caller.
  changed_.wait(lock, [&] {
    const auto found = runningCallbacks_.find(id);
    return found == runningCallbacks_.end() || found->second == std::this_thread::get_id();
  });
}

void GroupHealth::runAbortCallbacks() {
  std::unique_lock lock(mutex_);
  while (!callbacks_.empty()) {
    const auto [id, callback] = std::move(callbacks_.front());
    callbacks_.pop_front();
    runningCallbacks_.emplace(id, std::this_thread::get_id());
    lock.unlock();
    callback();
    lock.lock();
    runningCallbacks_.erase(id);
    changed_.notify_all();
  }
}

}  // namespace torchext
