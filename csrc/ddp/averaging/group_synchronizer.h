// GroupSynchronizer trains an attached model by averaging it within a group of workers after each round of steps.
//
// Whose groups they are is a GroupSource's business: prague's generator (prague_training.h; P-Reduce, Luo et al.,
// ASPLOS 2020, sections 3 to 5) or dssync's schedule (dssync_training.h; divide and shuffle, Wang et al., INFOCOM
// 2022).
//
// Orders
//   atc (adapt-then-combine)  After the optimizer's step the buckets are averaged on a thread of this object, in
//                             forward order; the next forward waits, module by module, for the bucket it needs.
//   cta (combine-then-adapt)  After the step the parameters are copied into the buckets, and averaged while the next
//                             forward and backward run on the local values; before the next step the parameters
//                             become the average, then the step applies the local gradient to it.
// Floating-point buffers (BatchNorm statistics) are averaged with the parameters. What the user writes into parameters
// meanwhile is kept, see TensorsInPlace.
//
// A round, and the class that each part of it passes
//   afterStep()    RoundCounter says whether the step closes a round, and PendingBuckets marks all buckets.
//   on `thread_`   GroupSource assigns the group; RoundAverage averages each bucket, in which GroupReducer adds up, and
//                  PendingBuckets releases it.
//   waitTensors()  PendingBuckets holds the next forward back (atc).
//   beforeStep()   RoundAverage applies what waits in the buckets (cta), DeferredAverage what was averaged in passing.
//
// Outstanding averages: a group may be owed an average in which others wait for this worker (outstanding_averages.h).
// Before the user's collectives in the middle of training (a logged loss, DDP's own) and before waits for another
// model's average, beginOutstanding() has DeferredAverage serve it. A training thread that is elsewhere (it evaluates,
// saves, waits in a barrier that torchext does not see) keeps others waiting, too. When no step has come for longer
// than steps take (step_pace.h), `thread_` does the same by itself. With a schedule nothing is owed ahead.
// A model in synchronize(), averaged() or detach() has nothing left to keep.
//
// Leaving: detach() completes every average owed to other workers and waits for them. leave() is the same with a limit,
// for exits without detach(): it runs from the group's shutdown.
//
// Threads: the training thread, autograd's (gradientsReady only), those of other collectives (beginOutstanding only),
// and `thread_`, which alone touches source_ (but for ask(), scheduled() and stop()), reducer_ and, while a bucket is
// pending, that bucket and its tensors. Locks: state_, then the one of PendingBuckets or SharedStats.
#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "c10d/backend/attachable_backend.h"
#include "c10d/threads/outstanding_averages.h"
#include "c10d/threads/task_thread.h"
#include "core/prague/step_pace.h"
#include "ddp/averaging/deferred_average.h"
#include "ddp/averaging/group_reducer.h"
#include "ddp/averaging/group_source.h"
#include "ddp/averaging/model_buckets.h"
#include "ddp/averaging/pending_buckets.h"
#include "ddp/averaging/round_average.h"
#include "ddp/averaging/round_counter.h"
#include "ddp/averaging/shared_stats.h"
#include "ddp/common/attach_agreement.h"
#include "ddp/common/replica_average.h"
#include "ddp/common/synchronizer.h"
#include "ddp/common/tensors_in_place.h"

namespace torchext {

// What a system makes of a GroupSynchronizer.
struct GroupTraining {
  c10::intrusive_ptr<AttachableBackend> group = nullptr;
  bool combine_then_adapt = false;  // cta; else atc
  std::int64_t period = 1;          // steps of a round
  bool shared_memory = true;        // groups on one host average through memory (c10d/transport/shared_windows.h)
  AgreementFields fields = {};      // options that must be the same on all ranks
  // Collective. host_of[rank]: dense host index. tag_base: two tags on the control group, the same on all ranks.
  std::function<std::unique_ptr<GroupSource>(const std::vector<int>& host_of, int tag_base)> make_source = {};
};

class GroupSynchronizer : public AveragingSynchronizer {
 public:
  // Collective. parameters (those that are trained), buffers, frozen (the other parameters): the model's, in
  // registration order; floating point; the same shapes on all ranks (checked: c10::DistBackendError on every rank,
  // naming the first rank that differs and the field).
  GroupSynchronizer(GroupTraining training, const std::vector<at::Tensor>& parameters,
                    const std::vector<at::Tensor>& buffers, const std::vector<at::Tensor>& frozen,
                    std::size_t bucket_bytes);
  ~GroupSynchronizer() override;

  void gradientsReady() override;
  void beforeStep() override;
  void afterStep() override;
  void waitTensors(const std::vector<std::int64_t>& tensors) override;
  void waitAll() override;
  void synchronize() override;
  void enterAverage() override;
  void leaveAverage() override { replicas_.leave(); }
  void detach() override;
  AveragingStats stats() const override { return stats_.read(); }
  std::int64_t steps() const override { return rounds_.steps(); }
  void setSteps(std::int64_t steps) override { resume(steps, 0); }
  void resume(std::int64_t own, std::int64_t furthest) override;

  // As detach(), for at most `limit`, and silent about failures: the process is on its way out.
  void leave(std::chrono::milliseconds limit) override;
  bool inForkedChild() const override { return group_->health()->inForkedChild(); }

 private:
  void postRound(std::int64_t round);
  void averageRound(std::int64_t round, FlightRecord& record);
  void wait(const PendingBuckets::Tensors& tensors);
  void expectStep();
  AverageDone beginOutstanding(WaitingFor what);
  AverageDone beginOnThread(std::function<void()> task);
  void meet(const std::function<void()>& task);
  void pause(WaitingFor what);
  void noteDistance(double distance);
  void takeBackMemory();
  void checkAttached() const;
  void fail(const std::exception_ptr& error);

  c10::intrusive_ptr<AttachableBackend> group_;
  const bool combine_then_adapt_;
  const ModelBuckets buckets_;
  SharedStats stats_;
  PendingBuckets pending_;
  std::mutex state_;  // of rounds and of what waits to be applied: guards tensors_, round_ and deferred_
  TensorsInPlace tensors_;
  GroupReducer reducer_;
  RoundAverage round_;
  DeferredAverage deferred_;
  ReplicaAverage replicas_;
  const int channel_;  // tells the group's models apart
  RoundCounter rounds_;
  std::unique_ptr<GroupSource> source_;  // null after leaving

  core::StepPace pace_;                // training thread
  std::atomic<bool> detached_{false};  // written by the training thread, read by those that begin outstanding averages
  std::atomic<bool> meeting_{false};

  std::uint64_t failure_callback_ = 0;
  std::uint64_t shutdown_callback_ = 0;
  std::uint64_t outstanding_id_ = 0;
  std::unique_ptr<TaskThread> thread_;  // last: ends before what it uses
};

}  // namespace torchext
