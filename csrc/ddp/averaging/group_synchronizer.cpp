#include "ddp/averaging/group_synchronizer.h"

#include <algorithm>
#include <utility>

#include <ATen/ThreadLocalState.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>

#include "c10d/threads/interruptible_wait.h"
#include "ddp/common/elapsed.h"

namespace torchext {
namespace {

// How long a model waits for its average before the other models of the process complete their outstanding averages,
// which costs them an average on the side. Long for two workers in step, short for two that wait for each other.
constexpr std::chrono::milliseconds kPatience{100};

}  // namespace

GroupSynchronizer::GroupSynchronizer(GroupTraining training, const std::vector<at::Tensor>& parameters,
                                     const std::vector<at::Tensor>& buffers, const std::vector<at::Tensor>& frozen,
                                     std::size_t bucket_bytes)
    : group_(std::move(training.group)),
      combine_then_adapt_(training.combine_then_adapt),
      period_(training.period),
      parameters_(parameters, bucket_bytes),
      buffers_(buffers, bucket_bytes),
      transfer_buffers_(transferBuffersOf(parameters_, buffers_)),
      bucket_of_(parameters_.bucketOf()),
      tensors_(parameters, buffers),
      average_(*group_, parameters_, buffers_, FrozenParameters(frozen)),
      channel_(group_->nextChannel()),
      pending_(bucketCount(), 0) {
  for (const std::int64_t index : buffers_.bucketOf()) {
    bucket_of_.push_back(static_cast<std::int64_t>(parameters_.size()) + index);
  }
  stats_.bucket_bytes = static_cast<std::int64_t>(parameters_.bytes() + buffers_.bytes());
  AgreementFields fields{agreementOf("parameters", parameters), agreementOf("buffers", buffers),
                         agreementOf("frozen parameters", frozen), AgreementField("bucket bytes", bucket_bytes)};
  fields.insert(fields.end(), training.fields.begin(), training.fields.end());
  agreeOnAttach(*group_, fields);
  TORCH_CHECK_VALUE(bucketCount() <= kMaxBuckets, group_->getBackendName(), ": buckets of ", bucket_bytes,
                    " bytes make ", bucketCount(), " of them, where ", kMaxBuckets, " is the most; raise bucket_mb");
  const std::vector<int> host_of = hostsOf(*group_);
  partial_ = std::make_unique<SubsetAllreduce>(group_->dataTransport(), channel_,
                                               group_->shareMemory(channel_, training.shared_memory));
  source_ = training.make_source(host_of, channel_);
  thread_ = std::make_unique<TaskThread>("tx_average");
  shutdown_callback_ = group_->addShutdownCallback([this] { leave(std::chrono::milliseconds(1500)); });
  outstanding_id_ = OutstandingAverages::add([this](WaitingFor what) { return beginOutstanding(what); });
  abort_callback_ = group_->health()->onFailure().add(
      [this] { source_->stop(c10::str(group_->health()->label(), ": ", group_->health()->reason().get().text)); });
}

GroupSynchronizer::~GroupSynchronizer() { GroupSynchronizer::leave(std::chrono::seconds(2)); }

const FlatBucket& GroupSynchronizer::bucket(std::size_t index) const {
  return index < parameters_.size() ? parameters_[index] : buffers_[index - parameters_.size()];
}

void GroupSynchronizer::gradientsReady() {
  group_->health()->checkProcess("training");
  // A device may have calls queued that others have yet to join, in front of what would be owed: see averageTask().
  if (!combine_then_adapt_ && !detached_ && averagesAt(steps_ + 1) && parameters_.onCpu() && buffers_.onCpu()) {
    // Errors are the averaging thread's to report: it waits for the answer.
    try {
      source_->ask();
      expectStep();
    } catch (...) {
      fail(std::current_exception());
    }
  }
}

void GroupSynchronizer::beforeStep() {
  group_->health()->checkProcess("training");
  waitAll();
  const std::lock_guard<std::mutex> lock(state_);
  applyPending();
  applyDeferred(/*heed_writes=*/true);
}

void GroupSynchronizer::afterStep() {
  waitAll();  // a step without its pre-hook: a closure that steps twice
  {
    // Formed inside the step, by a collective of the script: what has been written since is the optimizer's.
    const std::lock_guard<std::mutex> lock(state_);
    applyDeferred(/*heed_writes=*/false);
  }
  ++steps_;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ++stats_.steps;
  }
  pace_.stepped(Clock::now());
  expectStep();
  if (detached_ || !averagesAt(steps_)) {
    return;
  }
  tensors_.takeBack(group_->getBackendName());
  postRound(steps_ / period_ - 1);
}

// If none comes, nobody waits for this worker any more.
void GroupSynchronizer::expectStep() {
  if (!detached_ && !source_->scheduled()) {
    thread_->whenIdle(pace_.patience(), [this] { beginOutstanding(WaitingFor::kSomebody); });
  }
}

void GroupSynchronizer::resume(std::int64_t own, std::int64_t furthest) {
  steps_ = own;
  ++meetings_;  // what was told of steps before means nothing now
  resumed_from_ = source_->scheduled() ? furthest : 0;
}

void GroupSynchronizer::postRound(std::int64_t round) {
  const std::lock_guard<std::mutex> state(state_);
  tensors_.note();
  if (combine_then_adapt_) {
    snapshotBuffers();
  }
  FlightRecord record = group_->flights().begin("average", "all_reduce", transfer_buffers_, transfer_buffers_);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    std::fill(pending_.begin(), pending_.end(), 1);
    pending_count_ = static_cast<int>(pending_.size());
  }
  thread_->post([this, round, record, caller = at::ThreadLocalState()]() mutable {
    at::ThreadLocalStateGuard inherited(caller);
    averageTask(round, record);
  });
}

template <class Ready>
void GroupSynchronizer::waitUntil(const char* what, Ready ready) {
  group_->health()->checkProcess("training");
  std::unique_lock<std::mutex> lock(mutex_);
  if (!ready()) {
    RECORD_FUNCTION(what, std::vector<c10::IValue>{});
    const auto start = Clock::now();
    if (!changed_.wait_for(lock, kPatience, ready)) {
      // Somebody may be waiting for another model of this process, and this average for them.
      lock.unlock();
      if (!detached_ && source_->scheduled()) {
        group_->tellStep(channel_, meetings_, steps_);
      }
      std::vector<AverageDone> kept = OutstandingAverages::beginAll(WaitingFor::kSomebody, outstanding_id_);
      lock.lock();
      waitInterruptibly(changed_, lock, ready);  // ends: every wait of the averaging thread has the group's timeout
      lock.unlock();
      // While the others are at it, somebody may be waiting for this model's next group.
      if (std::any_of(kept.begin(), kept.end(),
                      [](const AverageDone& done) { return !OutstandingAverages::ready(done); })) {
        kept.push_back(beginOutstanding(WaitingFor::kSomebody));
      }
      OutstandingAverages::wait(kept);
      lock.lock();
    }
    stats_.exposed_ms += millisecondsSince(start);
  }
  if (error_) {
    std::rethrow_exception(error_);
  }
}

void GroupSynchronizer::waitTensors(const std::vector<std::int64_t>& tensors) {
  // cta leaves the parameters alone until the next step.
  if ((pending_count_ == 0 || combine_then_adapt_) && !failed_) {
    return;
  }
  waitUntil("torchext::wait_average", [&] {
    return error_ || std::all_of(tensors.begin(), tensors.end(), [&](std::int64_t tensor) {
             const auto bucket = static_cast<std::size_t>(bucket_of_.at(static_cast<std::size_t>(tensor)));
             return pending_[bucket] == 0;
           });
  });
}

void GroupSynchronizer::waitAll() {
  if (pending_count_ == 0 && !failed_) {
    return;
  }
  waitUntil("torchext::wait_average", [&] { return pending_count_ == 0 || error_; });
}

void GroupSynchronizer::release(std::size_t bucket) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (pending_[bucket] == 0) {
      return;
    }
    pending_[bucket] = 0;
    --pending_count_;
  }
  changed_.notify_all();
}

void GroupSynchronizer::fail(std::exception_ptr error) {
  // A broken connection becomes the error that names who died; the others learn of any other.
  const auto health = group_->health();
  const OpInfo op{.name = "training"};
  error = detached_ ? health->explain(error, op) : health->explainToAll(error, op);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!error_) {
      error_ = std::move(error);
      failed_ = true;
    }
  }
  changed_.notify_all();
}

AverageDone GroupSynchronizer::beginOnThread(std::function<void()> task) {
  auto promise = std::make_shared<std::promise<void>>();
  AverageDone kept = promise->get_future().share();
  const bool posted = thread_ && thread_->post([this, promise, task = std::move(task), state = at::ThreadLocalState()] {
    at::ThreadLocalStateGuard inherited(state);
    const c10::InferenceMode normal(false);  // of the caller: what is made here outlives it
    at::NoGradGuard no_grad;
    try {
      task();
    } catch (...) {
      fail(std::current_exception());
    }
    std::exception_ptr error;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      error = error_;
    }
    if (error) {
      promise->set_exception(error);
    } else {
      promise->set_value();
    }
  });
  return posted ? kept : AverageDone();
}

AveragingStats GroupSynchronizer::stats() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return stats_;
}

}  // namespace torchext
