// Where all workers of a GroupSynchronizer come together, and how one leaves.
#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include <c10/util/Logging.h>
#include <c10/util/ScopeExit.h>

#include "c10d/backend/delegating_work.h"
#include "c10d/fault/orderly_exit_scope.h"
#include "c10d/threads/interruptible_wait.h"
#include "ddp/averaging/group_synchronizer.h"

namespace torchext {

void GroupSynchronizer::checkAttached() const {
  TORCH_CHECK(!detached_, group_->getBackendName(),
              ": this synchronizer has been detached, by detach() or by the end of its process group");
}

// Waits for all the others, and returns the steps of the furthest. One that is ahead cannot come as long as it waits,
// in a round, for this one; it says so, and this one makes up for that round while it waits here.
std::int64_t GroupSynchronizer::arrive() {
  std::vector<at::Tensor> furthest{at::full({1}, steps_, at::kLong)};
  c10::intrusive_ptr<c10d::Work> work;
  {
    const InternalCollective internal;
    c10d::AllreduceOptions options;
    options.reduceOp = c10d::ReduceOp::MAX;
    work = group_->allreduce(furthest, options);
  }
  auto& all_here = dynamic_cast<DelegatingWork&>(*work);
  while (!all_here.overWithin(kSignalCheckInterval)) {
    checkSignals();
    makeUpTo(group_->furthestStep(channel_, meetings_));
  }
  work->wait();  // throws what has gone wrong
  return furthest[0].item<std::int64_t>();
}

// Rounds of steps that this worker has not made.
void GroupSynchronizer::makeUpTo(std::int64_t steps) {
  for (std::int64_t round = std::max(steps_, resumed_from_) / period_; round < steps / period_; ++round) {
    checkAttached();
    beforeStep();
    checkAttached();  // still: a signal's handler may end the group in any wait
    postRound(round);
    steps_ = (round + 1) * period_;
  }
}

// Collective, on the training thread: the averaging threads of workers that are ahead wait for the others' rounds.
void GroupSynchronizer::catchUp() {
  if (!source_->scheduled() || group_->getSize() == 1) {
    return;
  }
  try {
    const std::int64_t end = arrive();
    makeUpTo(end);
    steps_ = end;
    ++meetings_;
  } catch (...) {
    group_->abandonMeeting(std::current_exception());
    throw;
  }
}

void GroupSynchronizer::runOnThread(std::function<void()> task) {
  const AverageDone done = beginOnThread(std::move(task));
  TORCH_CHECK(done.valid(), group_->getBackendName(), ": this synchronizer has been detached");
  try {
    waitInterruptibly(done);
  } catch (...) {  // of a signal's handler: the task refers to the caller's frame
    group_->abandonMeeting(std::current_exception());
    done.wait();
    throw;
  }
  done.get();
}

// Where all workers come together, on the averaging thread. Its groups end with it, so nobody need wait for them.
void GroupSynchronizer::meet(const std::function<void()>& task) {
  group_->health()->checkProcess("training");
  OutstandingAverages::drain(WaitingFor::kEverybody);
  checkAttached();  // still: a signal's handler may end the group in any wait
  catchUp();
  beforeStep();
  meeting_ = true;
  const auto over = c10::make_scope_exit([this] { meeting_ = false; });
  runOnThread([&] {
    pause(WaitingFor::kEverybody);
    task();
  });
}

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
  if (orderly && !failed_) {
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
  group_->health()->onFailure().remove(abort_callback_);
  OutstandingAverages::remove(outstanding_id_);
  thread_->discard();
  thread_ = nullptr;
  // They hold the inner groups, which must end with the process group: the event loop of one that lives on, with its
  // peers gone, spins.
  partial_ = nullptr;
  source_ = nullptr;
}

}  // namespace torchext
