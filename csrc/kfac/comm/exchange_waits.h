// ExchangeWaits: how K-FAC waits for its peers, in a group of its own that nobody watches.
//
// A wait on the script's thread checks for signals (interruptible_wait.h). A wait on any thread ends when the
// model's group has failed or was shut down, with that group's reason, if it is one of torchext's. Both happen within
// kTick of the event. A wait that ends before its work leaves ranks that no longer know what the others have sent: the
// connections are closed, so that the others learn of it, and every later call throws.
//
// How. A collective's future says when it is done. A message can only be waited for in a call of Gloo that blocks. Its
// abort() ends that call and not the message, so that the wait may begin again: a thread (tx_kfac_waits) does so every
// kTick for all that wait. It sleeps while nobody does. Waits for works of a device do not block, and are only passed
// on.
//
// Threads: any; waits of several threads at once. Owned by shared_ptr: works hold it.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "c10d/fault/group_health.h"
#include "c10d/threads/bounded_thread.h"

namespace torchext {

class ExchangeWaits : public std::enable_shared_from_this<ExchangeWaits> {
 public:
  using Work = c10::intrusive_ptr<c10d::Work>;
  static constexpr std::chrono::milliseconds kTick{50};

  // backend: Gloo, of K-FAC's own group. model: of the model's group; null where that is none of torchext's.
  ExchangeWaits(c10::intrusive_ptr<c10d::Backend> backend, std::shared_ptr<GroupHealth> model);
  ~ExchangeWaits();
  ExchangeWaits(const ExchangeWaits&) = delete;
  ExchangeWaits& operator=(const ExchangeWaits&) = delete;

  // What `call` starts, of tensors on that device, whose wait() is then that of this object. peer: of a message; -1: a
  // collective. Null where `call` returns null.
  Work start(at::Device device, int peer, const std::function<Work()>& call);
  // What a wait of another kind calls every kTick. Throws what a signal's handler raises, or that the group has failed.
  void look();
  // Throws c10::DistBackendError where a wait has ended before its work, or the model's group can not be used.
  void checkUsable() const;
  std::chrono::milliseconds timeout() const { return backend_->getBackendOptions()->timeout; }

 private:
  class WatchedWork;
  struct Waiting;
  void wait(c10d::Work& work, int peer);
  void waitForMessage(c10d::Work& work);
  void waitForCollective(c10d::Work& work);
  [[noreturn]] void fail(int peer);
  void cut() noexcept;

  const c10::intrusive_ptr<c10d::Backend> backend_;
  const std::shared_ptr<GroupHealth> model_;
  const pid_t creator_;
  std::atomic<bool> cut_{false};
  const std::shared_ptr<Waiting> waiting_;
  BoundedThread thread_;
};

}  // namespace torchext
