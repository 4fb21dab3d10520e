// DelegatingBackend: the life of a backend of ours. It starts and watches its inner groups, splits, shrinks and ends
// them.
//
// What it is
//   The common base of our backends. Every ordinary collective goes to an inner backend (forwarded_collectives.h). On
//   top of that it adds what the inner backends lack (shared fault model):
//     * a poisoned state: the first failure fixes the reason; every later call throws it at once, buffers untouched;
//     * a FailureMonitor on a control group of its own, so that a dead peer is named on every rank within a second, and
//       one that is stopped or cut off within heartbeat_timeout;
//     * a CallCheck, so that ranks which call different collectives get an error that says which;
//     * abort() that ends pending waits in < 0.1 s, from any thread; shutdown() bounded to 2 s; both safe twice;
//     * a fork guard: calls in a forked child throw, its destructor detaches.
//
// Ownership and threads
//   The inner backends are built in Python (the wheel ships no Gloo headers) and owned here. Works returned to callers
//   are DelegatingWorks: their wait() watches the inner work and the poisoned state. No method holds the GIL.
//
// For subclasses
//   Pass your own name and Options to the constructor and override createChild() so that split() makes your class.
//   Begin every call of your own with health()->checkUsable(). Block only in waitPointToPoint() (group_waits.h), or in
//   something that a callback of health()->onFailure() wakes. Stop threads of your own in onShutdown(), and call
//   shutdown() first thing in your destructor.
//
// Call order: makeBackend() (living_backends.h) on every rank (collective, the inner groups connect) -> collectives ->
// shutdown() or abort().
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "c10d/backend/forwarded_collectives.h"
#include "c10d/fault/failure_monitor.h"

namespace torchext {

class DelegatingBackend : public ForwardedCollectives {
 public:
  // name: what the user typed ("prague"), for messages and getBackendName().
  // options: timeout and group name are read from here, and GroupOptions' if they are such; must not be null.
  DelegatingBackend(int rank, int size, const std::string& name, InnerBackends inner,
                    c10::intrusive_ptr<c10d::Backend::Options> options);
  ~DelegatingBackend() override;

  // The control group. Its tags from FailureMonitor::kReservedTags upwards are taken.
  c10::intrusive_ptr<c10d::Backend> control() const { return inner().all().control; }

  // In order: sends Leave to the peers, gives pending calls a second, ends what is left. At most 2 s, unless other
  // workers still train with an attached model (AttachableBackend::outwaitTraining); safe twice.
  void shutdown() override;
  // At once: every pending call on every rank raises; safe twice, from any thread.
  void abort() override;
  // For another reason than that a script wants it: what is under way on other ranks gets GroupHealth::kRemoteGrace, as
  // it may hold all its data. rank: whom the reason is about, -1 if nobody.
  void abortWithReason(const std::string& reason) { abortBecauseOf(rank_, reason); }
  void abortBecauseOf(int rank, const std::string& reason);
  // For process exit: shuts every living backend down and ends the threads of their inner groups, which must not touch
  // Python objects while the interpreter goes. Peers learn that this process leaves in order (empty reason), or why
  // not.
  static void leaveAll(const std::string& reason);

  // What shrink() makes the inner groups of the new group with: those of the ranks `remaining` (of this group, in
  // order), for the one of them that calls it. Collective among them. Comes from where inner backends can be built.
  using InnerFactory = std::function<InnerBackends(const std::vector<int>& remaining, int rank)>;
  void setInnerFactory(InnerFactory factory) { innerFactory_ = std::move(factory); }

  // Of intrusive_ptr_target: when the last owner lets go, before the destructor.
  void release_resources() override;

  // ---- c10d::Backend ----

  c10d::ErrorType getError() override;
  void setGroupUid(const std::string& uid) override;
  bool supportsSplitting() const override;
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<Options>& opts) override;
  bool supportsShrinking() const override { return static_cast<bool>(innerFactory_); }
  // The group without some ranks (dist.shrink_group). Collective among the others; this group may have failed, and its
  // connections are not used. flags: 1 (SHRINK_ABORT) aborts this group first. The new one has this one's options as
  // far as they fit it. Throws if a remaining rank does not come in time.
  c10::intrusive_ptr<c10d::Backend> shrink(const std::vector<int64_t>& ranks_to_exclude, int flags,
                                           const c10::intrusive_ptr<Options>& opts_override) override;
  void eagerConnectSingleDevice(at::Device device) override;
  bool supportsTensorAlloc(c10::DeviceIndex index) override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  std::shared_ptr<c10::Allocator> getMemAllocator() override;
  void enableCollectivesTiming() override;
  bool supportsTimeEstimation() const override;
  void registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override;
  void waitForPendingWorks() override;

 protected:
  // Makes the child group of split() and shrink(); subclasses return their own class.
  virtual c10::intrusive_ptr<c10d::Backend> createChild(int rank, int size, InnerBackends inner,
                                                        c10::intrusive_ptr<Options> options);
  // Called once, first thing in shutdown(): end threads of your own. Must not throw.
  virtual void onShutdown() {}
  // Whether shutdown() has begun, and what it throws once it is over: for onShutdown().
  bool inShutdown() const { return shutDown_; }
  void raiseAfterShutdown(std::exception_ptr error) { interruption_ = std::move(error); }

 private:
  struct NotStarted {};
  DelegatingBackend(NotStarted, int rank, int size, const std::string& name, InnerBackends inner,
                    c10::intrusive_ptr<c10d::Backend::Options> options);

  void start();
  FailureMonitor::Events monitorEvents(std::chrono::milliseconds patience);
  // shutdown(), and its end where another thread has begun it.
  void awaitShutdown();
  bool shutdownOver() {
    const std::lock_guard lock(shutdownMutex_);
    return shutdownOver_;
  }
  void dropInner(InnerGroups::Taken which, std::chrono::milliseconds limit) noexcept;

  const std::shared_ptr<FailureMonitor> monitor_;
  InnerFactory innerFactory_;  // until shutdown()
  std::atomic<bool> shutDown_{false};
  std::exception_ptr interruption_;  // of shutdown(), on its thread
  std::mutex shutdownMutex_;         // guards shutdownOver_
  std::condition_variable shutdownChanged_;
  bool shutdownOver_ = false;
};

}  // namespace torchext
