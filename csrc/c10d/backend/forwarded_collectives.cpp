#include "c10d/backend/forwarded_collectives.h"

#include <chrono>
#include <functional>
#include <memory>
#include <utility>

#include <ATen/ThreadLocalState.h>
#include <c10/util/Exception.h>

#include "c10d/backend/delegating_work.h"
#include "c10d/backend/quotient_work.h"
#include "c10d/fault/collective_header.h"
#include "c10d/fault/explain_error.h"
#include "c10d/fault/fault_points.h"
#include "c10d/fault/orderly_exit_scope.h"

namespace torchext {
namespace {

using c10d::OpType;

c10::DeviceType deviceOf(const at::Tensor& tensor) { return tensor.device().type(); }

// An empty list has no device; the CPU backend then says what is wrong with it.
c10::DeviceType deviceOf(const std::vector<at::Tensor>& tensors) {
  return tensors.empty() ? c10::DeviceType::CPU : deviceOf(tensors.front());
}

// One list a rank, as Gloo has it.
std::vector<at::Tensor> firstOf(const std::vector<std::vector<at::Tensor>>& lists) {
  return lists.empty() ? std::vector<at::Tensor>{} : lists.front();
}

c10::intrusive_ptr<c10d::Work> reduceAll(c10d::Backend& backend, std::vector<at::Tensor>& tensors,
                                         c10d::AllreduceOptions opts) {
  if (!QuotientWork::wanted(tensors, opts.reduceOp)) {
    return backend.allreduce(tensors, opts);
  }
  opts.reduceOp = c10d::ReduceOp::SUM;
  return c10::make_intrusive<QuotientWork>(backend.allreduce(tensors, opts), tensors, backend.getSize());
}

// What begins a work; fails it when destroyed without having run. Copies share it, as std::function wants.
class LaterStart {
 public:
  explicit LaterStart(c10::intrusive_ptr<DelegatingWork> work)
      : owned_(std::make_shared<Owned>(Owned{std::move(work)})) {}

  void run(const std::exception_ptr& error, const std::function<c10::intrusive_ptr<c10d::Work>()>& start) {
    if (const auto work = std::exchange(owned_->work, nullptr); error) {
      work->fail(error);
    } else {
      work->begin(start);
    }
  }

 private:
  struct Owned {
    c10::intrusive_ptr<DelegatingWork> work;
    explicit Owned(c10::intrusive_ptr<DelegatingWork> its) : work(std::move(its)) {}
    Owned(Owned&&) = default;
    ~Owned() {
      if (work) {
        work->drop();
      }
    }
  };
  std::shared_ptr<Owned> owned_;
};

}  // namespace

ForwardedCollectives::ForwardedCollectives(int rank, int size, const std::string& name, InnerBackends inner,
                                           c10::intrusive_ptr<Options> options)
    : CompatBackend(rank, size),
      options_(std::move(options)),
      health_(std::make_shared<GroupHealth>(name, rank, size)),
      inner_(std::move(inner), health_) {
  const InnerBackends groups = inner_.all();
  TORCH_CHECK_VALUE(groups.cpu && options_, name, ": needs a CPU backend and options");
  TORCH_CHECK_VALUE(groups.control || size == 1, name, ": needs a control group when there is more than one rank");
  for (const auto& group : {groups.cpu, groups.cuda, groups.control}) {
    TORCH_CHECK_VALUE(!group || (group->getRank() == rank && group->getSize() == size), name, ": inner backend ",
                      group ? group->getBackendName() : "", " does not have rank ", rank, " of ", size);
  }
  groupOptions().validateGroup();
  operation_timeout_ = groupOptions().operation_timeout;
  health_->identity().setGroupName(options_->group_name);
}

const GroupOptions& ForwardedCollectives::groupOptions() const {
  static const auto& defaults = *new GroupOptions("defaults");
  const auto* own = dynamic_cast<const GroupOptions*>(options_.get());
  return own ? *own : defaults;
}

void ForwardedCollectives::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  for (const auto& group : inner_.carriers()) {
    group->setTimeout(timeout);
  }
}

void ForwardedCollectives::extendTimeout(const std::chrono::milliseconds& timeout) {
  for (const auto& group : inner_.carriers()) {
    addEphemeralTimeoutIfAny(*group, timeout);
  }
}

template <typename Call>
ForwardedCollectives::Works ForwardedCollectives::forward(const OpInfo& op, c10::DeviceType device, Call&& call) {
  const bool on_cpu = device == c10::DeviceType::CPU;
  if (coalescing_ && !on_cpu) {
    noteCudaCallWhileCoalescing();
  }
  Works work;
  try {
    work = call(*inner_.of(device));
    faultPoint(FaultPoint::kCallStarted);
  } catch (...) {
    std::rethrow_exception(explain(*health_, std::current_exception(), op));
  }
  return wrap(op, std::move(work), on_cpu);
}

template <typename Call>
ForwardedCollectives::Works ForwardedCollectives::pointToPoint(const char* name, OpType type, int peer,
                                                               const Tensors& tensors, Call&& call) {
  health_->checkUsable(name);
  beforeMessage();
  const OpInfo op{.name = name,
                  .type = type,
                  .peer = peer,
                  .header = headerOf(type, tensors),
                  .since = std::chrono::steady_clock::now()};
  return forward(op, deviceOf(tensors), std::forward<Call>(call));
}

template <typename Call>
ForwardedCollectives::Works ForwardedCollectives::collective(const char* name, OpType type, c10::DeviceType device,
                                                             const core::CallHeader& header, Call call) {
  health_->checkUsable(name);
  const auto backend = inner_.of(device);
  beforeCollective();
  const bool checked = calls_ && device == c10::DeviceType::CPU;
  if (checked) {
    calls_->awaitRoom();  // before the call has a number, as a signal's handler may end it here
  }
  OpInfo op{.name = name,
            .type = type,
            .sequence = nextSequence(),
            .limit = operation_timeout_,
            .header = header,
            .since = std::chrono::steady_clock::now()};
  health_->progress().started(type, op.sequence);
  if (!checked) {
    return forward(op, device, call);
  }
  const auto ticket = calls_->record(header);
  if (!ticket) {
    return forward(op, device, call);
  }
  auto work = DelegatingWork::startLater(health_, op, rank_, options_->timeout);
  op.limit = options_->timeout;
  calls_->startLater(*ticket, op,
                     [start = LaterStart(work), backend = backend.get(), call,
                      state = at::ThreadLocalState()](const std::exception_ptr& error) mutable {
                       const at::ThreadLocalStateGuard as_caller(state);
                       start.run(error, [&] { return call(*backend); });
                     });
  if (coalescing_) {
    coalesced_.emplace_back(work);
  }
  return work;
}

ForwardedCollectives::Works ForwardedCollectives::wrap(const OpInfo& op, Works work, bool on_cpu) {
  if (!work) {
    return work;  // NCCL returns none while it coalesces
  }
  auto wrapped = DelegatingWork::wrap(health_, std::move(work), op, rank_, options_->timeout, on_cpu);
  if (coalescing_ && on_cpu) {
    coalesced_.emplace_back(wrapped);
  }
  return wrapped;
}

ForwardedCollectives::Works ForwardedCollectives::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  return collective("broadcast", OpType::BROADCAST, deviceOf(tensors),
                    headerOf(OpType::BROADCAST, tensors, opts.rootRank),
                    [tensors, opts](c10d::Backend& backend) mutable { return backend.broadcast(tensors, opts); });
}

ForwardedCollectives::Works ForwardedCollectives::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  return collective("all_reduce", OpType::ALLREDUCE, deviceOf(tensors),
                    headerOf(OpType::ALLREDUCE, tensors, opts.reduceOp),
                    [tensors, opts](c10d::Backend& backend) mutable { return reduceAll(backend, tensors, opts); });
}

ForwardedCollectives::Works ForwardedCollectives::allreduce_sparse(Tensors& tensors,
                                                                   const c10d::AllreduceOptions& opts) {
  return collective(
      "all_reduce_sparse", OpType::_ALLREDUCE_SPARSE, deviceOf(tensors),
      headerOf(OpType::_ALLREDUCE_SPARSE, tensors, opts.reduceOp),
      [tensors, opts](c10d::Backend& backend) mutable { return backend.allreduce_sparse(tensors, opts); });
}

ForwardedCollectives::Works ForwardedCollectives::allreduce_coalesced(Tensors& tensors,
                                                                      const c10d::AllreduceCoalescedOptions& opts) {
  return collective(
      "all_reduce_coalesced", OpType::ALLREDUCE_COALESCED, deviceOf(tensors),
      headerOf(OpType::ALLREDUCE_COALESCED, tensors, opts.reduceOp),
      [tensors, opts](c10d::Backend& backend) mutable { return backend.allreduce_coalesced(tensors, opts); });
}

ForwardedCollectives::Works ForwardedCollectives::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  return collective("reduce", OpType::REDUCE, deviceOf(tensors),
                    headerOf(OpType::REDUCE, tensors, opts.reduceOp, opts.rootRank),
                    [tensors, opts](c10d::Backend& backend) mutable { return backend.reduce(tensors, opts); });
}

ForwardedCollectives::Works ForwardedCollectives::allgather(TensorLists& outputs, Tensors& inputs,
                                                            const c10d::AllgatherOptions& opts) {
  return collective(
      "all_gather", OpType::ALLGATHER, deviceOf(inputs), headerOf(OpType::ALLGATHER, inputs),
      [outputs, inputs, opts](c10d::Backend& backend) mutable { return backend.allgather(outputs, inputs, opts); });
}

ForwardedCollectives::Works ForwardedCollectives::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                                  const c10d::AllgatherOptions& opts) {
  return collective(
      "all_gather_single", OpType::_ALLGATHER_BASE, deviceOf(input), headerOf(OpType::_ALLGATHER_BASE, {input}),
      [output, input, opts](c10d::Backend& backend) mutable { return backend._allgather_base(output, input, opts); });
}

ForwardedCollectives::Works ForwardedCollectives::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                                                      const c10d::AllgatherOptions& opts) {
  return collective("all_gather_coalesced", OpType::ALLGATHER_COALESCED, deviceOf(inputs),
                    headerOf(OpType::ALLGATHER_COALESCED, inputs),
                    [outputs, inputs, opts](c10d::Backend& backend) mutable {
                      return backend.allgather_coalesced(outputs, inputs, opts);
                    });
}

ForwardedCollectives::Works ForwardedCollectives::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                                  const c10d::AllgatherOptions& opts) {
  return collective("all_gather_single_coalesced", OpType::ALLGATHER_COALESCED, deviceOf(inputs),
                    headerOf(OpType::ALLGATHER_COALESCED, inputs),
                    [outputs, inputs, opts](c10d::Backend& backend) mutable {
                      return backend.allgather_into_tensor_coalesced(outputs, inputs, opts);
                    });
}

ForwardedCollectives::Works ForwardedCollectives::gather(TensorLists& outputs, Tensors& inputs,
                                                         const c10d::GatherOptions& opts) {
  return collective(
      "gather", OpType::GATHER, deviceOf(inputs), headerOf(OpType::GATHER, inputs, opts.rootRank),
      [outputs, inputs, opts](c10d::Backend& backend) mutable { return backend.gather(outputs, inputs, opts); });
}

ForwardedCollectives::Works ForwardedCollectives::gatherSingle(at::Tensor& output, at::Tensor& input,
                                                               const c10d::GatherOptions& opts) {
  return collective("gather_single", OpType::GATHER, deviceOf(input), headerOf(OpType::GATHER, {input}, opts.rootRank),
                    [output, input, opts](c10d::Backend& backend) mutable {
                      return gatherSingleIfAny(backend, output, input, opts);
                    });
}

ForwardedCollectives::Works ForwardedCollectives::scatter(Tensors& outputs, TensorLists& inputs,
                                                          const c10d::ScatterOptions& opts) {
  return collective(
      "scatter", OpType::SCATTER, deviceOf(outputs), headerOf(OpType::SCATTER, outputs, opts.rootRank),
      [outputs, inputs, opts](c10d::Backend& backend) mutable { return backend.scatter(outputs, inputs, opts); });
}

// Outputs may differ between ranks; the lists of inputs may not.
ForwardedCollectives::Works ForwardedCollectives::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                                                 const c10d::ReduceScatterOptions& opts) {
  return collective("reduce_scatter", OpType::REDUCE_SCATTER, deviceOf(outputs),
                    headerOf(OpType::REDUCE_SCATTER, firstOf(inputs), opts.reduceOp),
                    [outputs, inputs, opts](c10d::Backend& backend) mutable {
                      return backend.reduce_scatter(outputs, inputs, opts);
                    });
}

ForwardedCollectives::Works ForwardedCollectives::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                                       const c10d::ReduceScatterOptions& opts) {
  return collective("reduce_scatter_single", OpType::_REDUCE_SCATTER_BASE, deviceOf(input),
                    headerOf(OpType::_REDUCE_SCATTER_BASE, {input}, opts.reduceOp),
                    [output, input, opts](c10d::Backend& backend) mutable {
                      return backend._reduce_scatter_base(output, input, opts);
                    });
}

ForwardedCollectives::Works ForwardedCollectives::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
  return collective("reduce_scatter_single_coalesced", OpType::REDUCE_SCATTER, deviceOf(inputs),
                    headerOf(OpType::REDUCE_SCATTER, inputs, opts.reduceOp),
                    [outputs, inputs, opts](c10d::Backend& backend) mutable {
                      return backend.reduce_scatter_tensor_coalesced(outputs, inputs, opts);
                    });
}

// What ranks exchange all to all may differ from pair to pair, so that of each rank says nothing about the others'.
ForwardedCollectives::Works ForwardedCollectives::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                                std::vector<int64_t>& output_splits,
                                                                std::vector<int64_t>& input_splits,
                                                                const c10d::AllToAllOptions& opts) {
  return collective("all_to_all_single", OpType::ALLTOALL_BASE, deviceOf(input),
                    headerOfDtype(OpType::ALLTOALL_BASE, input),
                    [output, input, output_splits, input_splits, opts](c10d::Backend& backend) mutable {
                      return backend.alltoall_base(output, input, output_splits, input_splits, opts);
                    });
}

ForwardedCollectives::Works ForwardedCollectives::alltoall(Tensors& outputs, Tensors& inputs,
                                                           const c10d::AllToAllOptions& opts) {
  return collective(
      "all_to_all", OpType::ALLTOALL, deviceOf(inputs), headerOf(OpType::ALLTOALL),
      [outputs, inputs, opts](c10d::Backend& backend) mutable { return backend.alltoall(outputs, inputs, opts); });
}

ForwardedCollectives::Works ForwardedCollectives::send(Tensors& tensors, int dst_rank, int tag) {
  return pointToPoint("send", OpType::SEND, dst_rank, tensors,
                      [&](c10d::Backend& backend) { return backend.send(tensors, dst_rank, tag); });
}

ForwardedCollectives::Works ForwardedCollectives::recv(Tensors& tensors, int src_rank, int tag) {
  return pointToPoint("recv", OpType::RECV, src_rank, tensors,
                      [&](c10d::Backend& backend) { return backend.recv(tensors, src_rank, tag); });
}

ForwardedCollectives::Works ForwardedCollectives::recvAnysource(Tensors& tensors, int tag) {
  return pointToPoint("recv from any rank", OpType::RECVANYSOURCE, -1, tensors,
                      [&](c10d::Backend& backend) { return backend.recvAnysource(tensors, tag); });
}

ForwardedCollectives::Works ForwardedCollectives::barrier(const c10d::BarrierOptions& opts) {
  // Device indices only mean anything on GPUs; without them the barrier is one of processes, which the CPU carries.
  const bool on_cuda = (opts.device && opts.device->is_cuda()) || (!opts.device_ids.empty() && deviceInner());
  return collective("barrier", OpType::BARRIER, on_cuda ? c10::DeviceType::CUDA : c10::DeviceType::CPU,
                    OrderlyExitScope::here() ? headerOfOrderlyExit() : headerOf(OpType::BARRIER),
                    [opts](c10d::Backend& backend) { return backend.barrier(opts); });
}

void ForwardedCollectives::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  health_->checkUsable("monitored_barrier");
  beforeCollective();
  if (calls_) {
    calls_->drain();  // it takes its turn among Gloo's calls
  }
  inner_.of(c10::DeviceType::CPU)->monitoredBarrier(opts, wait_all_ranks);
}

bool ForwardedCollectives::supportsCoalescing() const { return deviceInner() && deviceInner()->supportsCoalescing(); }

void ForwardedCollectives::startCoalescing() {
  health_->checkUsable("start_coalescing");
  TORCH_CHECK(!coalescing_, health_->label(), ": startCoalescing() inside startCoalescing()");
  coalescing_ = true;
  cudaCoalescing_ = false;
  coalesced_.clear();
}

void ForwardedCollectives::noteCudaCallWhileCoalescing() {
  if (std::exchange(cudaCoalescing_, true)) {
    return;
  }
  inner_.of(c10::DeviceType::CUDA)->startCoalescing();
}

ForwardedCollectives::Works ForwardedCollectives::endCoalescing() {
  TORCH_CHECK(coalescing_, health_->label(), ": endCoalescing() without startCoalescing()");
  coalescing_ = false;
  auto works = std::exchange(coalesced_, {});
  if (cudaCoalescing_) {
    const OpInfo op{.name = "coalesced", .type = OpType::COALESCED, .sequence = nextSequence()};
    if (auto work = wrap(op, inner_.of(c10::DeviceType::CUDA)->endCoalescing(), false)) {
      works.push_back(std::move(work));
    }
  }
  if (works.size() == 1) {
    return works.front();
  }
  return c10::make_intrusive<JoinedWork>(std::move(works));
}

}  // namespace torchext
