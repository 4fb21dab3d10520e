// ForwardedCollectives passes every ordinary collective to the inner group of its tensors' device, exactly.
//
// A call's path: checkUsable() -> beforeCollective() -> its number -> CallCheck, where ranks agree on it -> the inner
// group -> a DelegatingWork, which a failure of the group ends.
//
// Threads: as with every c10d backend, all ranks call collectives in the same order; startCoalescing() to
// endCoalescing() is one thread's. The rest from any thread. No method holds the GIL.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "c10d/backend/group_options.h"
#include "c10d/backend/inner_groups.h"
#include "c10d/backend/torch_compat.h"
#include "c10d/fault/call_check.h"
#include "c10d/fault/group_health.h"

namespace torchext {

class ForwardedCollectives : public CompatBackend {
 public:
  using Works = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;

  // name: what the user typed ("prague"), for messages and getBackendName(). options: must not be null.
  ForwardedCollectives(int rank, int size, const std::string& name, InnerBackends inner,
                       c10::intrusive_ptr<Options> options);

  const std::shared_ptr<GroupHealth>& health() const { return health_; }
  InnerGroups& inner() { return inner_; }
  const InnerGroups& inner() const { return inner_; }
  // Of one call.
  std::chrono::milliseconds timeout() const { return options_->timeout; }

  const std::string getBackendName() const override { return health_->identity().backendName(); }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}  // starts at 0 on every rank
  uint64_t getSequenceNumberForGroup() override { return sequence_.load(); }

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

  bool supportsCoalescing() const override;
  void startCoalescing() override;
  Works endCoalescing() override;

 protected:
  // Called on the caller's thread before every collective and split, and before every message: what a subclass has
  // owed to peers on the side must be done first, or a peer would wait for this rank, and this rank in the call for
  // that peer.
  virtual void beforeCollective() {}
  virtual void beforeMessage() {}

  // The number of the next collective of this group; for collectives of subclasses.
  uint64_t nextSequence() { return ++sequence_; }

  // The options as GroupOptions; GroupOptions' defaults where they are none.
  const GroupOptions& groupOptions() const;
  // Null in a group of one, and where it is turned off. Set before any call.
  std::shared_ptr<CallCheck>& callCheck() { return calls_; }

  Works gatherSingle(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& opts) override;
  void extendTimeout(const std::chrono::milliseconds& timeout) override;
  c10d::Backend* deviceInner() const override { return inner_.all().cuda.get(); }

 private:
  // Checks, numbers, calls `call` with the inner group of `device`, and wraps its work. `call` owns what it needs: it
  // may run later, on another thread.
  template <typename Call>
  Works collective(const char* name, c10d::OpType type, c10::DeviceType device, const core::CallHeader& header,
                   Call call);
  template <typename Call>
  Works pointToPoint(const char* name, c10d::OpType type, int peer, const Tensors& tensors, Call&& call);
  template <typename Call>
  Works forward(const OpInfo& op, c10::DeviceType device, Call&& call);
  Works wrap(const OpInfo& op, Works work, bool on_cpu);
  void noteCudaCallWhileCoalescing();

  const c10::intrusive_ptr<Options> options_;
  std::chrono::milliseconds operation_timeout_{0};  // GroupOptions'
  const std::shared_ptr<GroupHealth> health_;
  InnerGroups inner_;
  std::shared_ptr<CallCheck> calls_;
  std::atomic<uint64_t> sequence_{0};

  // Between startCoalescing() and endCoalescing(), on the calling thread.
  bool coalescing_ = false;
  bool cudaCoalescing_ = false;
  std::vector<Works> coalesced_;
};

}  // namespace torchext
