#include "c10d/backend/process_group_prague.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <utility>

#include <ATen/ThreadLocalState.h>
#include <ATen/record_function.h>
#include <c10/util/StringUtil.h>

#include "c10d/backend/living_backends.h"
#include "c10d/backend/work_future.h"
#include "c10d/fault/explain_error.h"
#include "c10d/threads/outstanding_averages.h"
#include "core/prague/group_generator.h"

namespace torchext {
namespace {

// The work of one partial all-reduce: finished by this group's thread.
class PartialWork : public c10d::Work {
 public:
  PartialWork(std::shared_ptr<GroupHealth> health, int rank, at::Tensor tensor)
      : c10d::Work(rank, c10d::OpType::UNKNOWN, "torchext::partial_all_reduce"),
        health_(std::move(health)),
        nested_(CallbackThreads::here()),
        tensor_(std::move(tensor)) {}

  // Called once.
  void complete(const std::exception_ptr& error = nullptr) {
    FuturePtr future;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      over_ = true;
      error_ = error;
      future = future_;
    }
    finish(error);
    setFutureElsewhere(*health_, future, error, value(), nested_);
  }
  bool wait(std::chrono::milliseconds timeout) override {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto completed = [this] { return completed_; };
    if (timeout == kNoTimeout) {
      OutstandingAverages::waitAndDrain(cv_, lock, completed);
    } else if (!OutstandingAverages::waitAndDrain(cv_, lock, std::chrono::steady_clock::now() + timeout, completed)) {
      C10_THROW_ERROR(DistBackendError, c10::str("partial_all_reduce: not complete after wait(", timeout.count(),
                                                 " ms): operation timed out! The call itself goes on"));
    }
    lock.unlock();
    return c10d::Work::wait(kNoTimeout);  // done: throws what ended it
  }
  std::vector<at::Tensor> result() override { return {tensor_}; }
  FuturePtr getFuture() override {
    std::exception_ptr error;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (future_) {
        return future_;
      }
      future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
      if (!over_) {
        return future_;
      }
      error = error_;
    }
    setFuture(future_, error, value());
    return future_;
  }

 private:
  c10::IValue value() const { return std::vector<at::Tensor>{tensor_}; }

  const std::shared_ptr<GroupHealth> health_;
  const bool nested_;  // made in the callback of another call's future
  const at::Tensor tensor_;
  // Guarded by mutex_ of c10d::Work.
  bool over_ = false;  // complete() has been called
  std::exception_ptr error_;
  FuturePtr future_;  // made when first asked for
};

}  // namespace

void ProcessGroupPrague::Options::validate() const {
  checkEach(*this);
  TORCH_CHECK_VALUE(group_size != 1,
                    "PragueOptions.group_size must be 0 or at least 2, got 1 (a group of one averages "
                    "nothing)");
  if (generator == "static") {
    checkUnset("PragueOptions.group_size", group_size, 0, "generator \"static\", whose schedule fixes the groups");
    checkUnset("PragueOptions.sync_every", sync_every, -1, "generator \"static\", which has no divisions");
  }
  if (generator == "static" || generator == "random") {
    checkUnset("PragueOptions.slowdown_threshold", slowdown_threshold, -1,
               c10::str("generator \"", generator, "\", which leaves nobody out"));
  }
}

void ProcessGroupPrague::Options::validate(int world_size) const {
  validate();
  TORCH_CHECK_VALUE(group_size <= std::max(world_size, 1), "PragueOptions.group_size must be at most ", world_size,
                    ", the group's ranks, got ", group_size, "; leave it out to have it chosen");
}

void ProcessGroupPrague::Options::fit(int world_size) {
  group_size = std::min<std::int64_t>(group_size, world_size);
  if (group_size < 2) {
    group_size = 0;
  }
}

std::int64_t ProcessGroupPrague::Options::groupSizeFor(int world_size) const {
  if (group_size > 0) {
    return group_size;
  }
  // Pairs move the fewest bytes; from 8 ranks on, groups of 4 keep the consensus distance of 4 ranks in pairs.
  return std::min(world_size, world_size >= 8 ? 4 : 2);
}

std::int64_t ProcessGroupPrague::Options::slowdownThresholdFor() const {
  return slowdown_threshold >= 0 ? slowdown_threshold : 4;
}

std::int64_t ProcessGroupPrague::Options::syncEveryFor() const {
  if (sync_every >= 0) {
    return sync_every;
  }
  // Workers of one speed would keep meeting each other, and nobody else (update isolation).
  return generator == "ready-set" ? 16 : 0;
}

ProcessGroupPrague::ProcessGroupPrague(int rank, int size, InnerBackends inner, c10::intrusive_ptr<Options> options)
    : AttachableBackend(rank, size, "prague", std::move(inner), options), prague_options_(std::move(options)) {
  prague_options_->validate(size);
  std::unique_ptr<SharedWindows> windows;
  try {
    windows = shareMemory(kGroupTags, prague_options_->shared_memory);
  } catch (const std::exception& error) {
    if (!health()->failed()) {
      throw;
    }
    // Others have the group already, and have failed in their first call: that of this rank says why, too.
    LOG(WARNING) << health()->label() << ": failed while it was made: " << error.what();
  }
  shared_memory_ranks_ = windows ? windows->partners() : std::vector<int>{rank};
  partial_ = std::make_unique<SubsetAllreduce>(dataTransport(), kGroupTags, std::move(windows));
}

ProcessGroupPrague::~ProcessGroupPrague() {
  ProcessGroupPrague::shutdown();
  if (health()->inForkedChild()) {  // the thread is the parent's, and what it waits on can't be destroyed
    static_cast<void>(thread_.release());
    static_cast<void>(partial_.release());
  }
}

std::vector<int> ProcessGroupPrague::checkMembers(std::vector<int> members) const {
  std::sort(members.begin(), members.end());
  for (std::size_t i = 0; i < members.size(); ++i) {
    TORCH_CHECK_VALUE(members[i] >= 0 && members[i] < getSize(), "partial_all_reduce: member ", members[i],
                      " is not a rank of this group (0..", getSize() - 1,
                      "); members are group ranks, not global ones");
    TORCH_CHECK_VALUE(i == 0 || members[i] != members[i - 1], "partial_all_reduce: rank ", members[i],
                      " is named twice in members");
  }
  TORCH_CHECK_VALUE(std::binary_search(members.begin(), members.end(), getRank()),
                    "partial_all_reduce: the caller, rank ", getRank(), ", is not among the members [",
                    c10::Join(", ", members), "]; only members call it");
  return members;
}

void ProcessGroupPrague::checkTensor(const at::Tensor& tensor) const {
  TORCH_CHECK_TYPE(tensor.layout() == at::kStrided, "partial_all_reduce takes dense tensors, got layout ",
                   tensor.layout());
  TORCH_CHECK_VALUE(tensor.device().is_cpu(), "partial_all_reduce takes CPU tensors, got one on ", tensor.device(),
                    "; a model on CUDA is averaged through torchext.attach()");
  TORCH_CHECK_VALUE(tensor.is_contiguous(), "partial_all_reduce takes contiguous tensors, got strides ",
                    tensor.strides(), " for sizes ", tensor.sizes(), "; call .contiguous() first");
  reductionFor(tensor.scalar_type());
}

c10::intrusive_ptr<c10d::Work> ProcessGroupPrague::partialAllReduce(const at::Tensor& tensor,
                                                                    std::vector<int> members) {
  health()->checkUsable("partial_all_reduce");
  checkTensor(tensor);
  members = checkMembers(std::move(members));
  // Detached: the caller's tensor may require grad, and its data is what is averaged.
  at::Tensor data = tensor.detach();
  auto work = c10::make_intrusive<PartialWork>(health(), getRank(), tensor);
  if (members.size() == 1) {
    work->complete();
    return work;
  }
  startPartialThread();
  FlightRecord record = flights().begin("partial_all_reduce", "all_reduce", {data}, {data}, members);
  std::lock_guard<std::mutex> lock(mutex_);
  const std::uint64_t call_id = ++calls_[members];
  const bool posted =
      thread_->post([this, work, data, members, call_id, record, state = at::ThreadLocalState()]() mutable {
        at::ThreadLocalStateGuard inherited(state);
        RECORD_FUNCTION("torchext::partial_all_reduce", std::vector<c10::IValue>{});
        try {
          health()->checkUsable("partial_all_reduce");
          partial_->run(data, members, call_id, 1.0 / static_cast<double>(members.size()));
          record.done();
          work->complete();
        } catch (...) {
          work->complete(explainToAll(*health(), std::current_exception(), {.name = "partial_all_reduce"}));
        }
      });
  if (!posted) {
    C10_THROW_ERROR(DistBackendError, "prague: partial_all_reduce after shutdown");
  }
  return work;
}

// Most groups need none.
void ProcessGroupPrague::startPartialThread() {
  std::exception_ptr refused;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (thread_) {
      return;
    }
    try {
      thread_ = std::make_unique<TaskThread>("tx_prague");
    } catch (...) {
      refused = std::current_exception();
    }
  }
  if (refused) {  // the other members wait for this call
    std::rethrow_exception(explainToAll(*health(), refused, {.name = "partial_all_reduce"}));
  }
}

void ProcessGroupPrague::onShutdown() {
  AttachableBackend::onShutdown();
  TaskThread* thread = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    thread = thread_.get();
  }
  if (thread != nullptr) {
    if (!thread->finish(std::chrono::seconds(1))) {
      abort();  // ends the wait that the thread is in
    }
    thread->discard();
  }
  std::unique_ptr<SubsetAllreduce> partial;  // holds the inner group, which ends now: without the lock
  const std::lock_guard<std::mutex> lock(mutex_);
  partial = std::move(partial_);
}

std::optional<core::RackMap> ProcessGroupPrague::racks(const std::vector<int>& host_of) {
  if (prague_options_->generator != "smart" || !KnownRacks::worthMeasuring(host_of)) {
    return std::nullopt;
  }
  core::RackMap map = racks_.measure(*this, host_of);
  return map.dividesHosts() ? std::optional(std::move(map)) : std::nullopt;
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupPrague::createChild(int rank, int size, InnerBackends inner,
                                                                  c10::intrusive_ptr<c10d::Backend::Options> options) {
  auto own = childOptions(*prague_options_, *options);
  own->fit(size);
  return makeBackend<ProcessGroupPrague>(rank, size, std::move(inner), std::move(own));
}

}  // namespace torchext
