#include "ddp/averaging/group_synchronizer.h"

#include <algorithm>
#include <utility>

#include <ATen/ThreadLocalState.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Logging.h>
#include <c10/util/ScopeExit.h>

#include "c10d/fault/explain_error.h"
#include "c10d/fault/orderly_exit_scope.h"
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
      buckets_(parameters, buffers, bucket_bytes),
      pending_(buckets_.bucketOf(), buckets_.size()),
      tensors_(parameters, buffers),
      reducer_(buckets_, stats_),
      round_(combine_then_adapt_, buckets_, tensors_, reducer_, pending_, stats_),
      deferred_(buckets_, tensors_, reducer_),
      replicas_(*group_, buckets_.parameters(), buckets_.buffers(), FrozenParameters(frozen)),
      channel_(group_->nextChannel()),
      rounds_(*group_, training.period, channel_) {
  stats_.count([&](AveragingStats& stats) { stats.bucket_bytes = static_cast<std::int64_t>(buckets_.bytes()); });
  AgreementFields fields{agreementOf("parameters", parameters), agreementOf("buffers", buffers),
                         agreementOf("frozen parameters", frozen), AgreementField("bucket bytes", bucket_bytes)};
  fields.insert(fields.end(), training.fields.begin(), training.fields.end());
  agreeOnAttach(*group_, fields);
  TORCH_CHECK_VALUE(buckets_.size() <= GroupReducer::kMaxBuckets, group_->getBackendName(), ": buckets of ",
                    bucket_bytes, " bytes make ", buckets_.size(), " of them, where ", GroupReducer::kMaxBuckets,
                    " is the most; raise bucket_mb");
  const std::vector<int> host_of = hostsOf(*group_);
  reducer_.connect(std::make_unique<SubsetAllreduce>(group_->dataTransport(), channel_,
                                                     group_->shareMemory(channel_, training.shared_memory)));
  source_ = training.make_source(host_of, channel_);
  thread_ = std::make_unique<TaskThread>("tx_average");
  shutdown_callback_ = group_->addShutdownCallback([this] { leave(std::chrono::milliseconds(1500)); });
  outstanding_id_ = OutstandingAverages::add([this](WaitingFor what) { return beginOutstanding(what); });
  failure_callback_ = group_->health()->onFailure().add(
      [this] { source_->stop(c10::str(group_->health()->label(), ": ", group_->health()->reason().get().text)); });
}

GroupSynchronizer::~GroupSynchronizer() { GroupSynchronizer::leave(std::chrono::seconds(2)); }

// ---- A round ----

void GroupSynchronizer::gradientsReady() {
  group_->health()->checkProcess("training");
  // A device may have calls queued that others have yet to join, in front of what would be owed: see averageRound().
  if (!combine_then_adapt_ && !detached_ && rounds_.closesAt(rounds_.steps() + 1) && buckets_.onCpu()) {
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
  round_.apply();
  deferred_.apply(/*heed_writes=*/true);
}

void GroupSynchronizer::afterStep() {
  waitAll();  // a step without its pre-hook: a closure that steps twice
  {
    // Formed inside the step, by a collective of the script: what has been written since is the optimizer's.
    const std::lock_guard<std::mutex> lock(state_);
    deferred_.apply(/*heed_writes=*/false);
  }
  rounds_.stepped();
  stats_.count([](AveragingStats& stats) { ++stats.steps; });
  pace_.stepped(Clock::now());
  expectStep();
  if (detached_ || !rounds_.closesAt(rounds_.steps())) {
    return;
  }
  takeBackMemory();
  postRound(rounds_.round());
}

void GroupSynchronizer::postRound(std::int64_t round) {
  const std::lock_guard<std::mutex> lock(state_);
  round_.begin();
  FlightRecord record =
      group_->flights().begin("average", "all_reduce", buckets_.transferBuffers(), buckets_.transferBuffers());
  pending_.begin();
  thread_->post([this, round, record, caller = at::ThreadLocalState()]() mutable {
    at::ThreadLocalStateGuard inherited(caller);
    averageRound(round, record);
  });
}

void GroupSynchronizer::averageRound(std::int64_t round, FlightRecord& record) {
  at::NoGradGuard no_grad;
  try {
    if (!source_->scheduled()) {
      // To ask is to owe an average. A GPU's collective is only queued, it is over when all ranks have joined it, and
      // no copy of the parameters gets past it: owed before that, the average waits for ranks that may wait for it. So
      // what is queued ends first. A later collective waits for this round before it is queued (OutstandingAverages).
      buckets_.synchronizeDevices();
    }
    AssignedGroup group;
    {
      RECORD_FUNCTION("torchext::wait_generator", std::vector<c10::IValue>{});
      const auto start = Clock::now();
      group = source_->next(round);
      stats_.count([&](AveragingStats& stats) {
        stats.generator_wait_ms += millisecondsSince(start);
        stats.iteration_gap = group.behind;
      });
    }
    round_.average(group);
    source_->finished(group);
    record.done();
  } catch (...) {
    fail(std::current_exception());
  }
  pending_.releaseAll();
}

void GroupSynchronizer::waitTensors(const std::vector<std::int64_t>& tensors) {
  // cta leaves the parameters alone until the next step.
  if (pending_.settled() || (combine_then_adapt_ && !pending_.failed())) {
    return;
  }
  wait(at::IntArrayRef(tensors));
}

void GroupSynchronizer::waitAll() {
  if (!pending_.settled()) {
    wait(std::nullopt);
  }
}

void GroupSynchronizer::wait(const PendingBuckets::Tensors& tensors) {
  group_->health()->checkProcess("training");
  if (!pending_.over(tensors)) {
    RECORD_FUNCTION("torchext::wait_average", std::vector<c10::IValue>{});
    const auto start = Clock::now();
    if (!pending_.overWithin(kPatience, tensors)) {
      // Somebody may be waiting for another model of this process, and this average for them.
      if (!detached_ && source_->scheduled()) {
        rounds_.tell();
      }
      std::vector<AverageDone> kept = OutstandingAverages::beginAll(WaitingFor::kSomebody, outstanding_id_);
      pending_.wait(tensors);  // ends: every wait of the averaging thread has the group's timeout
      // While the others are at it, somebody may be waiting for this model's next group.
      if (std::any_of(kept.begin(), kept.end(),
                      [](const AverageDone& done) { return !OutstandingAverages::ready(done); })) {
        kept.push_back(beginOutstanding(WaitingFor::kSomebody));
      }
      OutstandingAverages::wait(kept);
    }
    stats_.count([&](AveragingStats& stats) { stats.exposed_ms += millisecondsSince(start); });
  }
  pending_.rethrow();
}

void GroupSynchronizer::fail(const std::exception_ptr& error) {
  // A broken connection becomes the error that names who died; the others learn of any other.
  const auto health = group_->health();
  const OpInfo op{.name = "training"};
  pending_.fail(detached_ ? explain(*health, error, op) : explainToAll(*health, error, op));
}

// ---- Averages that others wait for ----

// If none comes, nobody waits for this worker any more.
void GroupSynchronizer::expectStep() {
  if (!detached_ && !source_->scheduled()) {
    thread_->whenIdle(pace_.patience(), [this] { beginOutstanding(WaitingFor::kSomebody); });
  }
}

AverageDone GroupSynchronizer::beginOutstanding(WaitingFor what) {
  // In a forked child there is no thread.
  if (detached_ || pending_.failed() || meeting_ || source_->scheduled() || inForkedChild()) {
    return {};
  }
  return beginOnThread([this, what] {
    const std::lock_guard<std::mutex> lock(state_);
    round_.defer(deferred_);
    source_->pause(what, [this](const AssignedGroup& group) { deferred_.average(group); });
  });
}

AverageDone GroupSynchronizer::beginOnThread(std::function<void()> task) {
  auto promise = std::make_shared<std::promise<void>>();
  AverageDone done = promise->get_future().share();
  const bool posted = thread_ && thread_->post([this, promise, task = std::move(task), state = at::ThreadLocalState()] {
    at::ThreadLocalStateGuard inherited(state);
    const c10::InferenceMode normal(false);  // of the caller: what is made here outlives it
    at::NoGradGuard no_grad;
    try {
      task();
    } catch (...) {
      fail(std::current_exception());
    }
    try {
      pending_.rethrow();
      promise->set_value();
    } catch (...) {
      promise->set_exception(std::current_exception());
    }
  });
  return posted ? done : AverageDone();
}

// ---- Where all workers come together ----

void GroupSynchronizer::checkAttached() const {
  TORCH_CHECK(!detached_, group_->getBackendName(),
              ": this synchronizer has been detached, by detach() or by the end of its process group");
}

void GroupSynchronizer::resume(std::int64_t own, std::int64_t furthest) {
  rounds_.resume(own, source_->scheduled() ? furthest : 0);
}

// The task runs on the averaging thread. Its groups end with it, so nobody need wait for them.
void GroupSynchronizer::meet(const std::function<void()>& task) {
  group_->health()->checkProcess("training");
  OutstandingAverages::drain(WaitingFor::kEverybody);
  checkAttached();  // still: a signal's handler may end the group in any wait
  if (source_->scheduled()) {
    rounds_.catchUp([this](std::int64_t round) {
      checkAttached();
      beforeStep();
      checkAttached();
      postRound(round);
    });
  }
  beforeStep();
  meeting_ = true;
  const auto over = c10::make_scope_exit([this] { meeting_ = false; });
  const AverageDone done = beginOnThread([&] {
    pause(WaitingFor::kEverybody);
    task();
  });
  TORCH_CHECK(done.valid(), group_->getBackendName(), ": this synchronizer has been detached");
  try {
    waitInterruptibly(done);
  } catch (...) {  // of a signal's handler: the task refers to this frame
    group_->abandonMeeting(std::current_exception());
    done.wait();
    throw;
  }
  done.get();
}

void GroupSynchronizer::pause(WaitingFor what) {
  const std::lock_guard<std::mutex> lock(state_);
  source_->pause(what, [this](const AssignedGroup& group) {
    round_.begin();
    round_.average(group);
    round_.apply();
  });
}

void GroupSynchronizer::synchronize() {
  checkAttached();
  takeBackMemory();
  meet([this] { noteDistance(replicas_.form()); });
}

void GroupSynchronizer::enterAverage() {
  checkAttached();
  replicas_.checkNotEntered();
  takeBackMemory();
  meet([this] { noteDistance(replicas_.enter()); });
}

// The averaging thread may be reading them, for others.
void GroupSynchronizer::takeBackMemory() {
  const std::lock_guard<std::mutex> lock(state_);
  tensors_.takeBack(group_->getBackendName());
}

void GroupSynchronizer::noteDistance(double distance) {
  stats_.count([&](AveragingStats& stats) { stats.consensus_distance = distance; });
}

// ---- The end ----

void GroupSynchronizer::detach() {
  if (detached_) {
    return;
  }
  meet([this] {
    const InternalCollective internal;
    group_->barrier(c10d::BarrierOptions())->wait();  // rank 0's generator serves until everybody has left
  });
  leave(std::chrono::milliseconds(0));
}

void GroupSynchronizer::leave(std::chrono::milliseconds limit) {
  if (group_->health()->inForkedChild()) {
    return;
  }
  group_->removeShutdownCallback(shutdown_callback_);  // first: another thread may be leaving with the group
  if (!thread_) {
    return;
  }
  const std::shared_ptr<void> itself = group_->release(this);  // may be the last owner: goes last
  const bool orderly = !detached_ && limit.count() > 0;
  if (orderly) {
    group_->announceLeaving();
  }
  if (orderly && !pending_.failed()) {
    thread_->post([this] {
      at::NoGradGuard no_grad;
      const OrderlyExitScope orderly_exit;
      try {
        pause(WaitingFor::kSomebody);  // the others may train on
        if (!source_->scheduled()) {   // there, who trains on waits for this one's next round
          const InternalCollective internal;
          group_->barrier(c10d::BarrierOptions())->wait();
        }
      } catch (const std::exception& error) {
        LOG(INFO) << group_->health()->label() << ": left without the others: " << error.what();
      }
    });
    const auto finished = [this](std::chrono::milliseconds within) { return thread_->finish(within); };
    if (!finished(limit) && !group_->outwaitTraining(finished)) {
      LOG(WARNING) << group_->health()->label() << ": leaving while other workers still train; call "
                   << "sync.detach(), or evaluate under sync.averaged(), before the script ends";
      const OrderlyExitScope orderly_exit;
      group_->abortWithReason(c10::str("rank ", group_->getRank(), " left while others still trained with it"));
    }
  }
  detached_ = true;
  source_->stop("the synchronizer has been detached");
  group_->health()->onFailure().remove(failure_callback_);
  OutstandingAverages::remove(outstanding_id_);
  thread_->discard();
  thread_ = nullptr;
  // They hold the inner groups, which must end with the process group: the event loop of one that lives on, with its
  // peers gone, spins.
  reducer_.disconnect();
  source_ = nullptr;
}

}  // namespace torchext
