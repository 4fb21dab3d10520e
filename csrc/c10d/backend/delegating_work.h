// DelegatingWork: what ForwardedCollectives return for every call. It stands for the work of an inner backend.
//
// How it waits
//   CPU collectives: on a condition variable of its own, signalled by the inner work's future or by a failure of the
//     group, so abort() ends a wait even while a thread of Gloo is still stuck in the call. getFuture() behaves the
//     same; its callbacks run on threads of their own, which no call needs (callback_threads.h).
//   Point-to-point: Gloo completes these only inside wait(), so it waits there, through waitPointToPoint()
//   (group_waits.h).
//     So do collectives that Gloo makes of others (reduce_scatter), which have no future.
//   CUDA: forwards to the inner work, whose wait orders streams and does not block the CPU.
//   Whatever blocks drains the averages that attached models owe since the call was made (outstanding_averages.h). A
//   wait for the future itself cannot: it is torch's.
//
// A call may start later than its work is made (call_check.h): startLater() makes the work, begin() or fail() follow.
//
// Lifetime: a pending collective is kept alive by the callback on its inner future, even when the caller drops it;
// one that has not begun, by who will begin it.
#pragma once

#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include <ATen/core/ivalue.h>

#include "c10d/backend/torch_compat.h"
#include "c10d/fault/group_health.h"

namespace torchext {

class DelegatingWork final : public CompatWork, public PendingOperation {
 public:
  // timeout: what the group allows for one call, for getTimeout().
  static c10::intrusive_ptr<DelegatingWork> wrap(std::shared_ptr<GroupHealth> health,
                                                 c10::intrusive_ptr<c10d::Work> inner, const OpInfo& op, int rank,
                                                 std::chrono::milliseconds timeout, bool on_cpu);

  // A collective of CPU tensors that begins later.
  static c10::intrusive_ptr<DelegatingWork> startLater(std::shared_ptr<GroupHealth> health, const OpInfo& op, int rank,
                                                       std::chrono::milliseconds timeout);
  // start: makes the inner work. Not called when the group has failed meanwhile.
  void begin(const std::function<c10::intrusive_ptr<c10d::Work>()>& start);
  // Instead of begin().
  void fail(const std::exception_ptr& error);
  // The same, when the group ends before the call has begun.
  void drop() { fail(health_->failureOf(op_)); }

  DelegatingWork(std::shared_ptr<GroupHealth> health, c10::intrusive_ptr<c10d::Work> inner, const OpInfo& op, int rank,
                 std::chrono::milliseconds timeout);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  // timeout 0: as long as the inner backend allows. Otherwise throws DistBackendError when it passes; the call goes on.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  // Whether a collective of CPU tensors is over, well or not, after `limit` at most. Nobody else is heeded meanwhile.
  bool overWithin(std::chrono::milliseconds limit);
  void blockCurrentStream() override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  float getDuration() const override;
  uint64_t getSequencenumber() const override;

 protected:
  std::chrono::milliseconds workTimeout() const override { return timeout_; }
  std::function<void()> interrupt() override;

 private:
  enum class Mode { kFuture, kPointToPoint, kInside, kForward };

  // Completes when the inner future does; called once.
  void follow(const c10::intrusive_ptr<c10::ivalue::Future>& inner_future);
  // With the call on GroupHealth's list from now on.
  void enlistAndFollow(const c10::intrusive_ptr<c10::ivalue::Future>& inner_future);
  // In the wait of the inner work, whose errors it explains.
  bool waitInside(std::chrono::milliseconds timeout);
  // The inner work; null before begin(), or when it never began.
  c10::intrusive_ptr<c10d::Work> inner() const;
  // The same; throws when there is none.
  c10::intrusive_ptr<c10d::Work> begun(const char* what) const;
  // The first call decides the outcome.
  void complete(const std::exception_ptr& error);

  const std::shared_ptr<GroupHealth> health_;
  const OpInfo op_;
  const std::chrono::milliseconds timeout_;
  const bool profiled_;
  const bool nested_;  // made in the callback of another call's future
  Mode mode_ = Mode::kForward;

  mutable std::mutex stateMutex_;  // guards what follows
  std::condition_variable stateChanged_;
  c10::intrusive_ptr<c10d::Work> inner_;
  bool done_ = false;
  std::exception_ptr error_;
  c10::intrusive_ptr<c10::ivalue::Future> innerFuture_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // made when first asked for
};

// Several works as one, for endCoalescing().
class JoinedWork final : public CompatWork {
 public:
  explicit JoinedWork(std::vector<c10::intrusive_ptr<c10d::Work>> works);
  bool isCompleted() override;
  bool isSuccess() const override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override;
  void abort() override;
  std::vector<at::Tensor> result() override;

 protected:
  std::chrono::milliseconds workTimeout() const override { return kNoTimeout; }

 private:
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

}  // namespace torchext
