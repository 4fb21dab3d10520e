// DelegatingWork: what a DelegatingBackend returns for every call. It stands for the work of an inner backend.
//
// How it waits
//   CPU collectives: on a condition variable of its own, signalled by the inner work's future or by a failure of the
//     group, so abort() ends a wait even while a thread of Gloo is still stuck in the call. getFuture() behaves the
//     same.
//   Point-to-point: Gloo completes these only inside wait(), so it waits there, through GroupHealth::waitPointToPoint.
//   CUDA: forwards to the inner work, whose wait orders streams and does not block the CPU.
//
// Lifetime: a pending collective is kept alive by the callback on its inner future, even when the caller drops it.
#pragma once

#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <vector>

#include <ATen/core/ivalue.h>

#include "c10d/group_health.h"
#include "c10d/torch_compat.h"

namespace torchext {

class DelegatingWork final : public CompatWork, public PendingOperation {
 public:
  // timeout: what the group allows for one call, for getTimeout().
  static c10::intrusive_ptr<DelegatingWork> wrap(std::shared_ptr<GroupHealth> health,
                                                 c10::intrusive_ptr<c10d::Work> inner, const OpInfo& op, int rank,
                                                 std::chrono::milliseconds timeout, bool on_cpu);

  DelegatingWork(std::shared_ptr<GroupHealth> health, c10::intrusive_ptr<c10d::Work> inner, const OpInfo& op, int rank,
                 std::chrono::milliseconds timeout);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override { return inner_->sourceRank(); }
  std::vector<at::Tensor> result() override { return inner_->result(); }
  void synchronize() override;
  // timeout 0: as long as the inner backend allows. Otherwise throws DistBackendError when it passes; the call goes on.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void blockCurrentStream() override { inner_->blockCurrentStream(); }
  void abort() override { inner_->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override { return inner_->getFutureResult(); }
  float getDuration() const override { return inner_->getDuration(); }
  uint64_t getSequencenumber() const override;

 protected:
  std::chrono::milliseconds workTimeout() const override { return timeout_; }
  std::function<void()> interrupt() override;

 private:
  enum class Mode { kFuture, kPointToPoint, kForward };

  // Follows the inner future; called once, after construction.
  void follow(const c10::intrusive_ptr<c10::ivalue::Future>& inner_future);
  // The first call decides the outcome.
  void complete(const std::exception_ptr& error);

  const std::shared_ptr<GroupHealth> health_;
  const c10::intrusive_ptr<c10d::Work> inner_;
  const OpInfo op_;
  const std::chrono::milliseconds timeout_;
  const bool profiled_;
  Mode mode_ = Mode::kForward;

  mutable std::mutex stateMutex_;
  std::condition_variable stateChanged_;
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
