#include "c10d/backend/delegating_work.h"

#include <utility>
#include <vector>

#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include "c10d/backend/work_future.h"
#include "c10d/fault/explain_error.h"
#include "c10d/fault/fault_points.h"
#include "c10d/fault/group_waits.h"
#include "c10d/threads/outstanding_averages.h"

namespace torchext {
namespace {

// Null for an inner work without one (Gloo's reduce_scatter), which completes inside its own wait.
FuturePtr futureOf(c10d::Work& work) {
  try {
    return work.getFuture();
  } catch (const c10::Error&) {
    return {};
  }
}

// What the future of the outer work is completed with.
c10::IValue valueOf(const FuturePtr& future) {
  return future ? future->value() : c10::IValue(std::vector<at::Tensor>{});
}

}  // namespace

c10::intrusive_ptr<DelegatingWork> DelegatingWork::wrap(std::shared_ptr<GroupHealth> health,
                                                        c10::intrusive_ptr<c10d::Work> inner, const OpInfo& op,
                                                        int rank, std::chrono::milliseconds timeout, bool on_cpu) {
  auto work = c10::make_intrusive<DelegatingWork>(std::move(health), std::move(inner), op, rank, timeout);
  if (!on_cpu) {
    return work;
  }
  if (c10d::isP2POp(op.type)) {
    work->mode_ = Mode::kPointToPoint;
    return work;
  }
  const auto future = futureOf(*work->inner());
  if (!future) {
    work->mode_ = Mode::kInside;
    return work;
  }
  work->mode_ = Mode::kFuture;
  work->enlistAndFollow(future);
  return work;
}

c10::intrusive_ptr<DelegatingWork> DelegatingWork::startLater(std::shared_ptr<GroupHealth> health, const OpInfo& op,
                                                              int rank, std::chrono::milliseconds timeout) {
  auto work = c10::make_intrusive<DelegatingWork>(std::move(health), nullptr, op, rank, timeout);
  work->mode_ = Mode::kFuture;
  work->health_->add(work.get(), op);
  return work;
}

void DelegatingWork::begin(const std::function<c10::intrusive_ptr<c10d::Work>()>& start) {
  if (health_->failed()) {
    fail(health_->failureOf(op_));
    return;
  }
  c10::intrusive_ptr<c10::ivalue::Future> future;
  try {
    auto inner = start();
    faultPoint(FaultPoint::kCallStarted);
    {
      std::lock_guard lock(stateMutex_);
      inner_ = inner;
    }
    future = futureOf(*inner);
    if (!future) {
      inner->wait(kNoTimeout);
    }
  } catch (const std::exception&) {
    health_->remove(this);  // before explain(), see follow()
    complete(explain(*health_, std::current_exception(), op_));
    return;
  }
  if (future) {
    follow(future);
  } else {
    complete(nullptr);
    health_->remove(this);
  }
}

void DelegatingWork::fail(const std::exception_ptr& error) {
  health_->remove(this);
  complete(error);
}

DelegatingWork::DelegatingWork(std::shared_ptr<GroupHealth> health, c10::intrusive_ptr<c10d::Work> inner,
                               const OpInfo& op, int rank, std::chrono::milliseconds timeout)
    : CompatWork(rank, op.type),
      health_(std::move(health)),
      op_(op),
      timeout_(timeout),
      profiled_(at::hasCallbacks()),
      nested_(CallbackThreads::here()),
      inner_(std::move(inner)) {}

c10::intrusive_ptr<c10d::Work> DelegatingWork::inner() const {
  std::lock_guard lock(stateMutex_);
  return inner_;
}

c10::intrusive_ptr<c10d::Work> DelegatingWork::begun(const char* what) const {
  auto work = inner();
  TORCH_CHECK(work, health_->describe(op_), ": ", what, " of a call that has not started");
  return work;
}

void DelegatingWork::follow(const c10::intrusive_ptr<c10::ivalue::Future>& inner_future) {
  {
    std::lock_guard lock(stateMutex_);
    innerFuture_ = inner_future;
  }
  auto self = c10::intrusive_ptr<DelegatingWork>::reclaim_copy(this);
  inner_future->addCallback([self = std::move(self)](c10::ivalue::Future& future) {
    if (!future.hasError()) {
      self->complete(nullptr);  // first: who finds the list empty finds all callbacks posted
      self->health_->remove(self.get());
      return;
    }
    // Out of the list first: explain() may poison the group, which gives what is in the list time to end.
    self->health_->remove(self.get());
    self->complete(explain(*self->health_, future.exception_ptr(), self->op_));
  });
}

void DelegatingWork::enlistAndFollow(const c10::intrusive_ptr<c10::ivalue::Future>& inner_future) {
  std::exception_ptr refused;
  try {
    health_->add(this, op_);
  } catch (const std::exception&) {
    refused = std::current_exception();
  }
  follow(inner_future);
  if (!refused) {
    return;
  }
  // The group failed while the call was being made. The inner call may still succeed, as those under way may.
  std::unique_lock lock(stateMutex_);
  if (stateChanged_.wait_for(lock, health_->remoteGrace(), [this] { return done_; })) {
    return;
  }
  lock.unlock();
  complete(refused);
}

void DelegatingWork::complete(const std::exception_ptr& error) {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    std::lock_guard lock(stateMutex_);
    if (done_) {
      return;
    }
    done_ = true;
    error_ = error;
    future = future_;
    stateChanged_.notify_all();
  }
  if (!error && op_.sequence > 0) {
    health_->progress().completed();
  }
  if (future) {
    setFutureElsewhere(*health_, future, error, error ? c10::IValue() : valueOf(innerFuture_), nested_);
  }
}

std::function<void()> DelegatingWork::interrupt() {
  // Linked means that the call has not begun, and who will begin it holds a reference, or that the inner future's
  // callback has not run, which holds one.
  auto self = c10::intrusive_ptr<DelegatingWork>::reclaim_copy(this);
  return [self = std::move(self)] { self->complete(self->health_->failureOf(self->op_)); };
}

bool DelegatingWork::waitInside(std::chrono::milliseconds timeout) {
  try {
    return inner()->wait(timeout);
  } catch (...) {
    std::rethrow_exception(explain(*health_, std::current_exception(), op_));
  }
}

bool DelegatingWork::wait(std::chrono::milliseconds timeout) {
  if (mode_ == Mode::kPointToPoint) {
    OutstandingAverages::drainDuring(
        [&] { waitPointToPoint(*health_, inner(), timeout == kNoTimeout ? timeout_ : timeout, op_); });
    return true;
  }
  if (mode_ == Mode::kForward) {
    return waitInside(timeout);
  }
  if (mode_ == Mode::kInside) {
    bool completed = false;
    OutstandingAverages::drainDuring([&] { completed = waitInside(timeout); });
    return completed;
  }
  std::unique_lock lock(stateMutex_);
  if (timeout == kNoTimeout) {
    OutstandingAverages::waitAndDrain(stateChanged_, lock, [this] { return done_; });
  } else if (!OutstandingAverages::waitAndDrain(stateChanged_, lock, std::chrono::steady_clock::now() + timeout,
                                                [this] { return done_; })) {
    lock.unlock();
    C10_THROW_ERROR(DistBackendError, c10::str(health_->describe(op_), ": not complete after wait(", timeout.count(),
                                               " ms): operation timed out! The call itself goes on"));
  }
  if (error_) {
    std::rethrow_exception(error_);
  }
  lock.unlock();
  // The inner work ends its profiler event just after its future: a profiled caller expects the event to be there.
  if (profiled_) {
    inner()->wait(kNoTimeout);
  }
  return true;
}

bool DelegatingWork::overWithin(std::chrono::milliseconds limit) {
  std::unique_lock lock(stateMutex_);
  return stateChanged_.wait_for(lock, limit, [this] { return done_; });
}

void DelegatingWork::synchronize() {
  if (mode_ == Mode::kForward || mode_ == Mode::kInside) {
    inner()->synchronize();
  }
}

bool DelegatingWork::isCompleted() {
  if (mode_ != Mode::kFuture) {
    return inner()->isCompleted();
  }
  std::lock_guard lock(stateMutex_);
  return done_;
}

bool DelegatingWork::isSuccess() const {
  if (mode_ != Mode::kFuture) {
    return inner()->isSuccess();
  }
  std::lock_guard lock(stateMutex_);
  return done_ && !error_;
}

std::exception_ptr DelegatingWork::exception() const {
  if (mode_ != Mode::kFuture) {
    return inner()->exception();
  }
  std::lock_guard lock(stateMutex_);
  return error_;
}

c10::intrusive_ptr<c10::ivalue::Future> DelegatingWork::getFuture() {
  if (mode_ != Mode::kFuture) {
    return inner()->getFuture();
  }
  std::exception_ptr error;
  {
    std::lock_guard lock(stateMutex_);
    if (future_) {
      return future_;
    }
    future_ = c10::make_intrusive<c10::ivalue::Future>(innerFuture_ ? innerFuture_->elementType()
                                                                    : c10::ListType::create(c10::TensorType::get()));
    if (!done_) {
      return future_;
    }
    error = error_;
  }
  setFuture(future_, error, error ? c10::IValue() : valueOf(innerFuture_));
  return future_;
}

uint64_t DelegatingWork::getSequencenumber() const {
  return op_.sequence > 0 ? op_.sequence : begun("sequence number")->getSequencenumber();
}

int DelegatingWork::sourceRank() const { return begun("source rank")->sourceRank(); }

std::vector<at::Tensor> DelegatingWork::result() { return begun("result")->result(); }

void DelegatingWork::blockCurrentStream() { begun("stream")->blockCurrentStream(); }

void DelegatingWork::abort() { begun("abort")->abort(); }

c10::intrusive_ptr<c10::ivalue::Future> DelegatingWork::getFutureResult() { return begun("result")->getFutureResult(); }

float DelegatingWork::getDuration() const { return begun("duration")->getDuration(); }

JoinedWork::JoinedWork(std::vector<c10::intrusive_ptr<c10d::Work>> works)
    : CompatWork(-1, c10d::OpType::COALESCED), works_(std::move(works)) {}

bool JoinedWork::isCompleted() {
  for (const auto& work : works_) {
    if (!work->isCompleted()) {
      return false;
    }
  }
  return true;
}

bool JoinedWork::isSuccess() const {
  for (const auto& work : works_) {
    if (!work->isSuccess()) {
      return false;
    }
  }
  return true;
}

bool JoinedWork::wait(std::chrono::milliseconds timeout) {
  for (const auto& work : works_) {
    work->wait(timeout);
  }
  return true;
}

void JoinedWork::synchronize() {
  for (const auto& work : works_) {
    work->synchronize();
  }
}

void JoinedWork::abort() {
  for (const auto& work : works_) {
    work->abort();
  }
}

std::vector<at::Tensor> JoinedWork::result() {
  std::vector<at::Tensor> tensors;
  for (const auto& work : works_) {
    const auto part = work->result();
    tensors.insert(tensors.end(), part.begin(), part.end());
  }
  return tensors;
}

}  // namespace torchext
