// GroupSynchronizer: trains an attached model by averaging it within a group of workers after each round of steps.
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
// Floating-point buffers (BatchNorm statistics) are averaged with the parameters. In cta a forward changes them while
// their average is on its way; then the average is corrected by what the forward added. What the user writes into
// parameters meanwhile is kept, see TensorsInPlace.
//
// Threads: the training thread, autograd's (gradientsReady only) and `thread_`, which alone touches source_ (but for
// ask()), partial_ and, while a bucket is pending, that bucket and its tensors.
// Collectives of the user in the middle of training (a logged loss, DDP's own) and waits for another model's average: a
// group may be owed an average in which others wait for this worker (outstanding_averages.h). beginOutstanding() serves
// it without touching parameters that a forward or backward may be using: it sends what it has, and remembers the
// difference that the average makes, to be added before the next step. Costs a copy of the parameters while such a
// difference waits. The collective may be another thread's, with training under way: `state_` keeps the two apart. A
// model in synchronize(), averaged() or detach() has nothing left to keep.
// A training thread that is elsewhere (it evaluates, saves, waits in a barrier that torchext does not see) keeps others
// waiting, too. When no step has come for longer than steps take (step_pace.h), `thread_` does the same by itself.
// With a schedule nothing is owed ahead: each round runs by itself once its step is taken. A worker that took fewer
// steps than others (a gradient scaler skipped some) makes up for the rounds at the next collective call of the
// synchronizer. One that is ahead may wait for such a round, and come to the call only afterwards: it tells all ranks
// its step (AttachableBackend::tellStep), and who waits in the call makes the rounds up to that one. These are rounds
// of steps that somebody has taken, so which rounds are made does not depend on who waits for whom, nor for how long.
// Where the group takes the place of one that failed, workers are some steps apart. Each keeps its number, so that all
// have the same when they have come to the same place of the script; those behind make theirs without rounds. Leaving:
// detach() completes every average owed to other workers and waits for them. leave() is the same with a limit, for
// exits without detach(): it runs from the group's shutdown. Files: group_synchronizer.cpp (hooks and waits),
// group_meetings.cpp (collective calls, leaving), group_averaging.cpp (what the thread does).
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "c10d/backend/attachable_backend.h"
#include "c10d/threads/outstanding_averages.h"
#include "c10d/threads/task_thread.h"
#include "c10d/transport/subset_allreduce.h"
#include "core/prague/step_pace.h"
#include "ddp/averaging/group_source.h"
#include "ddp/common/attach_agreement.h"
#include "ddp/common/flat_buckets.h"
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
  static constexpr std::size_t kMaxBuckets = 65536;  // their numbers are the low digits of a call's

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
  void leaveAverage() override;
  void detach() override;
  AveragingStats stats() const override;
  std::int64_t steps() const override { return steps_; }
  void setSteps(std::int64_t steps) override { resume(steps, 0); }
  void resume(std::int64_t own, std::int64_t furthest) override;

  // As detach(), for at most `limit`, and silent about failures: the process is on its way out.
  void leave(std::chrono::milliseconds limit) override;
  bool inForkedChild() const override { return group_->health()->inForkedChild(); }

 private:
  bool averagesAt(std::int64_t step) const {
    return group_->getSize() > 1 && step % period_ == 0 && step > resumed_from_;
  }
  void postRound(std::int64_t round);
  void catchUp();
  std::int64_t arrive();
  void makeUpTo(std::int64_t steps);
  void averageTask(std::int64_t round, FlightRecord& record);
  void averageNow(const AssignedGroup& group);
  void reduceBucket(std::size_t index, const AssignedGroup& group);
  void addUp(std::size_t index, const AssignedGroup& group);
  double scaleOf(std::size_t index, std::int64_t members) const;
  void applyPending();
  AverageDone beginOutstanding(WaitingFor what);
  void expectStep();
  void averageDeferred(const AssignedGroup& group);
  void deferPending();
  void noteSigns(std::size_t index, at::Tensor nonnegative);
  // heed_writes: a parameter that has been written since keeps what was written; not where only the optimizer writes.
  void applyDeferred(bool heed_writes);
  void noteDistance(double distance);
  void pause(WaitingFor what);
  void meet(const std::function<void()>& task);
  void release(std::size_t bucket);
  void fail(std::exception_ptr error);
  void checkAttached() const;
  void snapshotBuffers();
  void keep(std::size_t index);
  at::Tensor meanOf(std::size_t index, std::int64_t members) const;
  template <class Ready>
  void waitUntil(const char* what, Ready ready);
  AverageDone beginOnThread(std::function<void()> task);
  void runOnThread(std::function<void()> task);
  const FlatBucket& bucket(std::size_t index) const;
  std::size_t bucketCount() const { return parameters_.size() + buffers_.size(); }

  c10::intrusive_ptr<AttachableBackend> group_;
  const bool combine_then_adapt_;
  const std::int64_t period_;
  FlatBuckets parameters_;
  FlatBuckets buffers_;
  const std::vector<at::Tensor> transfer_buffers_;  // of both
  std::vector<std::int64_t> bucket_of_;             // [tensor], parameters then buffers
  // Of rounds and of what waits to be applied: tensors_ to deferred_ and apply_members_. Taken before mutex_.
  std::mutex state_;
  TensorsInPlace tensors_;
  std::vector<at::Tensor> before_;          // cta, by bucket: what was packed; of parameters where they may be written
  std::vector<at::Tensor> deferred_;        // by bucket: to be added before the next step; empty: nothing
  std::vector<at::Tensor> deferred_signs_;  // of buffers: where keepSign() may hold a sum's sign
  ReplicaAverage average_;
  const int channel_;  // tells the group's models apart
  std::unique_ptr<SubsetAllreduce> partial_;
  std::unique_ptr<GroupSource> source_;

  std::int64_t steps_ = 0;             // training thread
  core::StepPace pace_;                // training thread
  std::uint32_t meetings_ = 0;         // with a schedule: how often all have caught up; the same on all ranks
  std::int64_t resumed_from_ = 0;      // rounds of steps up to it are nobody's any more
  std::int64_t apply_members_ = 0;     // cta: of the average that waits to be applied; 0: none
  std::atomic<bool> detached_{false};  // written by the training thread, read by those that begin outstanding averages
  std::atomic<bool> meeting_{false};

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::vector<char> pending_;  // by bucket
  std::exception_ptr error_;
  AveragingStats stats_;
  std::atomic<int> pending_count_{0};  // lets a module's pre-hook pass without the lock
  std::atomic<bool> failed_{false};

  std::uint64_t abort_callback_ = 0;
  std::uint64_t shutdown_callback_ = 0;
  std::uint64_t outstanding_id_ = 0;
  std::unique_ptr<TaskThread> thread_;  // last: ends before what it uses
};

}  // namespace torchext
