// DelegatingBackend: a c10d::Backend that holds inner backends and forwards every ordinary collective to them, exactly.
//
// What it is
//   The common base of ProcessGroupPrague (and later Hop, DSSync, DeAR). A tensor's device picks the inner backend:
//   Gloo for CPU, NCCL for CUDA. On top of what the inner backends do it adds what they lack (shared fault model):
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
//   As with every c10d backend, all ranks call collectives in the same order.
//
// For subclasses
//   Pass your own name and Options to the constructor and override createChild() so that split() makes your class.
//   Begin every call of your own with checkUsable(). Block only in waitPointToPoint(), or in something that an abort
//   callback wakes. Stop threads of your own in onShutdown(), and call shutdown() first thing in your destructor.
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
#include <unordered_map>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "c10d/backend/group_options.h"
#include "c10d/backend/torch_compat.h"
#include "c10d/fault/call_check.h"
#include "c10d/fault/closed_in_children.h"
#include "c10d/fault/failure_monitor.h"
#include "c10d/fault/group_health.h"

namespace torchext {

// The groups a backend stands on, all of the same ranks in the same order.
struct InnerBackends {
  c10::intrusive_ptr<c10d::Backend> cpu;                // Gloo; never null
  c10::intrusive_ptr<c10d::Backend> cuda;               // NCCL; null when torch has no CUDA or no GPU is visible
  c10::intrusive_ptr<c10d::Backend> control;            // Gloo of its own: liveness, generator; null in a group of one
  std::shared_ptr<ClosedInChildren> sockets = nullptr;  // of the Gloo groups
};

class DelegatingBackend : public CompatBackend {
 public:
  // name: what the user typed ("prague"), for messages and getBackendName().
  // options: timeout and group name are read from here, and GroupOptions' if they are such; must not be null.
  DelegatingBackend(int rank, int size, std::string name, InnerBackends inner,
                    c10::intrusive_ptr<c10d::Backend::Options> options);
  ~DelegatingBackend() override;

  // ---- For subclasses and for csrc/ddp ----

  // The backend for tensors of this device. Throws for a device without one, naming the way out, and after shutdown().
  c10::intrusive_ptr<c10d::Backend> inner(c10::DeviceType device) const;
  // The control group. Its tags from FailureMonitor::kReservedTags upwards are taken.
  c10::intrusive_ptr<c10d::Backend> control() const { return innerBackends().control; }
  FailureMonitor& failureMonitor() const { return *monitor_; }
  const std::shared_ptr<FailureMonitor>& sharedMonitor() const { return monitor_; }
  const std::shared_ptr<GroupHealth>& health() const { return health_; }
  // The group's timeout for one call.
  std::chrono::milliseconds timeout() const { return options_->timeout; }

  // Throws c10::DistBackendError with the first reason if the group failed, was shut down, or in a forked child.
  void checkUsable(const char* op) const { health_->checkUsable(op); }
  void checkProcess(const char* op) const { health_->checkProcess(op); }
  // Ends the group's use on every rank. rankOrMinus1: whom the reason is about. Only the first reason counts.
  void poison(int rank_or_minus1, const std::string& reason) { health_->poison(rank_or_minus1, reason); }
  // Callbacks run once when the group fails or is aborted; at once if it has failed already. remove waits for one that
  // runs, and is safe in one.
  uint64_t addAbortCallback(std::function<void()> callback) { return health_->addAbortCallback(std::move(callback)); }
  void removeAbortCallback(uint64_t id) { health_->removeAbortCallback(id); }
  // Waits for a send or recv posted on an inner group so that poison() and abort() end the wait.
  // timeout: 0 is that which the inner group connected with. peer: the other rank, -1 for any. what: a literal for
  // messages.
  // Throws DistBackendError naming backend, peer and who died. Costs two short locks, no allocation.
  void waitPointToPoint(const c10::intrusive_ptr<c10d::Work>& work, std::chrono::milliseconds timeout, int peer,
                        const char* what) {
    health_->waitPointToPoint(work, timeout, {.name = what, .peer = peer});
  }
  // The same for calls that carry a sequence number, or for the endless wait of a service (op.background).
  void waitPointToPoint(const c10::intrusive_ptr<c10d::Work>& work, std::chrono::milliseconds timeout,
                        const OpInfo& op) {
    health_->waitPointToPoint(work, timeout, op);
  }

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

  // ---- c10d::Backend: what it is ----

  const std::string getBackendName() const override { return name_; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  c10d::ErrorType getError() override;
  void setSequenceNumberForGroup() override {}  // starts at 0 on every rank
  uint64_t getSequenceNumberForGroup() override { return sequence_.load(); }
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
  bool supportsCoalescing() const override;
  void startCoalescing() override;
  c10::intrusive_ptr<c10d::Work> endCoalescing() override;

  // ---- c10d::Backend: collectives, forwarded by device ----

  using Works = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;

  Works broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  Works allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  Works allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  Works allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  Works reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  Works allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  Works _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override;
  Works allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  Works allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  Works gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override;
  Works scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& opts) override;
  Works reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& opts) override;
  Works _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override;
  Works reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                        const c10d::ReduceScatterOptions& opts) override;
  Works alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                      std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) override;
  Works alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
  Works send(Tensors& tensors, int dst_rank, int tag) override;
  Works recv(Tensors& tensors, int src_rank, int tag) override;
  Works recvAnysource(Tensors& tensors, int tag) override;
  Works barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;

 protected:
  // Makes the child group of split() and shrink(); subclasses return their own class.
  virtual c10::intrusive_ptr<c10d::Backend> createChild(int rank, int size, InnerBackends inner,
                                                        c10::intrusive_ptr<Options> options);
  // Called once, first thing in shutdown(): end threads of your own. Must not throw.
  virtual void onShutdown() {}
  // Whether shutdown() has begun, and what it throws once it is over: for onShutdown().
  bool inShutdown() const { return shutDown_; }
  void raiseAfterShutdown(std::exception_ptr error) { interruption_ = std::move(error); }

  // Called on the caller's thread before every collective and split, and before every message: what a subclass has
  // owed to peers on the side must be done first, or a peer would wait for this rank, and this rank in the call for
  // that peer.
  virtual void beforeCollective() {}
  virtual void beforeMessage() {}

  // The number of the next collective of this group; for collectives of subclasses.
  uint64_t nextSequence() { return ++sequence_; }

  void extendTimeout(const std::chrono::milliseconds& timeout) override;
  Works gatherSingle(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& opts) override;
  c10d::Backend* deviceInner() const override { return innerBackends().cuda.get(); }

 private:
  struct NotStarted {};
  DelegatingBackend(NotStarted, int rank, int size, std::string name, InnerBackends inner,
                    c10::intrusive_ptr<c10d::Backend::Options> options);

  // Checks, numbers, calls `call` with the inner backend for `device`, and wraps its work. `call` owns what it needs:
  // it may run later, on another thread.
  template <typename Call>
  Works collective(const char* name, c10d::OpType type, c10::DeviceType device, const core::CallHeader& header,
                   Call call);
  template <typename Call>
  Works pointToPoint(const char* name, c10d::OpType type, int peer, const Tensors& tensors, Call&& call);
  template <typename Call>
  Works forward(const OpInfo& op, c10::DeviceType device, Call&& call);
  FailureMonitor::Events monitorEvents(std::chrono::milliseconds patience) const;
  Works wrap(const OpInfo& op, Works work, bool on_cpu);
  void noteCudaCallWhileCoalescing();
  // shutdown(), and its end where another thread has begun it.
  void awaitShutdown();
  bool shutdownOver() {
    const std::lock_guard lock(shutdownMutex_);
    return shutdownOver_;
  }
  const GroupOptions& watchedOptions() const;
  void start();
  void closeConnections() noexcept;
  InnerBackends innerBackends() const;
  enum class Dropped : std::uint8_t { kGloo, kAll };
  void dropInner(Dropped which, std::chrono::milliseconds limit) noexcept;

  const std::string name_;
  mutable std::mutex innerMutex_;
  InnerBackends inner_;  // shutdown() lets go of Gloo's, while other threads have copies
  const c10::intrusive_ptr<Options> options_;
  std::chrono::milliseconds operation_timeout_{0};  // GroupOptions'
  const std::shared_ptr<GroupHealth> health_;
  const std::shared_ptr<FailureMonitor> monitor_;
  std::shared_ptr<CallCheck> calls_;  // null in a group of one, and where it is turned off
  InnerFactory innerFactory_;         // until shutdown()
  std::atomic<uint64_t> sequence_{0};
  std::atomic<bool> shutDown_{false};
  std::exception_ptr interruption_;  // of shutdown(), on its thread
  std::mutex shutdownMutex_;         // guards shutdownOver_
  std::condition_variable shutdownChanged_;
  bool shutdownOver_ = false;

  // Between startCoalescing() and endCoalescing(), on the calling thread.
  bool coalescing_ = false;
  bool cudaCoalescing_ = false;
  std::vector<Works> coalesced_;
};

}  // namespace torchext
