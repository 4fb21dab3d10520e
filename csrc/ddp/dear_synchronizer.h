// DearSynchronizer: trains an attached model with decoupled all-reduce (Zhang et al., "DeAR", ICDCS 2023):
// reduce-scatter of the gradients under the backward pass, all-gather under the next forward pass.
//   sharded     every rank steps its slice of every parameter, the parameters are gathered; the optimizer's state is
//               1 / world size
//   replicated  (the paper's) the gradients are gathered, and every rank steps each parameter before the forward pass
//               needs it; for optimizers that want whole gradients
//
// The data's path in a training step:
//   backward   gradientReady(i), for each parameter; a bucket of which all gradients are there is reduce-scattered,
//              buckets in one order on all ranks. DDP's reducer sleeps, as inside no_sync(): it would copy every
//              gradient into its buckets and back.
//   step       the optimizer holds SteppedParameters (torchext/_dear_parameter.py), whose .grad is gradient(i): it
//              waits for the bucket. What has arrived is stepped before the rest (arrivedBuckets()). afterStep() queues
//              the all-gathers, in the order of the forward pass.
//   forward    waitTensors() in front of each module waits for its buckets. Replicated: then Python steps them.
// While DearPlanner says so the model trains as plain DDP instead (allreduce()): its reducer is awake, and the
// optimizer holds the parameters.
//
// Gradients: the parameters' own .grad stay local. A parameter that got no gradient travels as zeros with a mark; one
// that no rank has a gradient for has none (the optimizer skips it), as in single-process training.
// Gradient accumulation: only a backward pass whose forward ran outside no_sync() exchanges anything; then .grad holds
// the sum of all micro-batches.
//
// Threads: the training thread, autograd's (gradientReady, backwardEnds) and exchange_'s. A bucket's
// buffer is exchange_'s; between reduce-scatter and all-gather the training thread has its own chunk.
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "c10d/process_group_dear.h"
#include "c10d/shard_transport.h"
#include "ddp/dear_planner.h"
#include "ddp/exchange_thread.h"
#include "ddp/gradient_hooks.h"
#include "ddp/shard_buckets.h"
#include "ddp/synchronizer.h"

namespace torchext {

// Since attach; times in milliseconds.
struct DearStats {
  std::int64_t steps = 0;
  bool allreduce = false;        // trains as plain DDP at the moment
  bool decided = false;          // the search for the best plan is over
  double exposed_rs_ms = 0;      // the training thread waited for a reduce-scatter,
  double exposed_ag_ms = 0;      //   for an all-gather
  double rs_ms = 0;              // reduce-scatters were under way,
  double ag_ms = 0;              //   all-gathers
  double allreduce_step_ms = 0;  // median step of plain DDP when it was measured; 0: never
  std::int64_t bytes_sent = 0;
  std::int64_t staging_bytes = 0;
  std::size_t bucket_bytes = 0;          // limit of a bucket
  std::vector<std::int64_t> buckets;     // bytes of each, in the order of the backward pass
  std::vector<core::TunerTrial> trials;  // of rank 0; elsewhere empty
};

class DearSynchronizer : public Synchronizer {
 public:
  using MakeLane = std::function<c10::intrusive_ptr<ProcessGroupDear>()>;

  // Collective. parameters: the model's, in registration order; floating point, dense, on one device; the same shapes
  // and names on all ranks (checked). names: for messages. unused_allowed: a backward pass need not reach every
  // parameter (DDP's find_unused_parameters). bucket_mb: instead of the options'. make_lane: makes a group of the same
  // ranks, whose collectives carry the exchanges and that nobody else uses; called when all ranks are known to want
  // one. None: point-to-point on `group`, on the CPU only.
  DearSynchronizer(c10::intrusive_ptr<ProcessGroupDear> group, std::vector<at::Tensor> parameters,
                   std::vector<std::string> names, bool unused_allowed, std::optional<double> bucket_mb,
                   const MakeLane& make_lane = {});
  ~DearSynchronizer() override;

  // The last forward pass ran outside (true) or inside (false) no_sync().
  void expectBackward(bool exchanges);
  // In a hook of that forward pass's output: a backward pass begins. Without it the pass of the first gradient counts.
  void backwardBegins() { queueEnd(); }

  // Whether the model trains as plain DDP. Changes in afterStep() only.
  bool allreduce() const { return planner_.plan().allreduce; }
  bool replicated() const { return replicated_; }
  // What the optimizer steps, sharing memory with the parameter: this rank's slice (1-D, in memory order), or all of
  // it.
  at::Tensor stepped(std::size_t parameter) const;
  // Its averaged gradient: waits for it; none when there is none to step with. Sharded: a view of the staging buffer,
  // valid until afterStep(). Replicated: gathers all gradients first if that has not begun; valid until the next
  // backward pass.
  std::optional<at::Tensor> gradient(std::size_t parameter);
  // In both forms this rank's slice of it, before anything is gathered (gathered(): too late).
  std::optional<at::Tensor> ownGradient(std::size_t parameter);
  bool gathered() const { return gathered_; }
  // Buckets come in the order of the backward pass. arrivedBuckets(): how many have; waits until it is more than
  // `known`, or all. bucketOf(): none for what is not exchanged.
  std::size_t bucketCount() const { return reducing_.size(); }
  std::optional<std::size_t> bucketOf(std::size_t parameter) const;
  std::size_t arrivedBuckets(std::size_t known);
  // As optimizer.zero_grad(): there is no gradient until the next backward pass.
  void clearGradients();

  void beforeStep() override;
  void afterStep() override;
  void waitTensors(const std::vector<std::int64_t>& tensors) override;
  void waitAll() override;
  void synchronize() override;
  void detach() override;
  void leave(std::chrono::milliseconds limit) override;
  bool inForkedChild() const override { return group_->health()->inForkedChild(); }

  DearStats stats() const;
  std::int64_t steps() const override { return steps_; }
  void setSteps(std::int64_t steps) override { steps_ = steps; }

 private:
  void gradientReady(std::size_t parameter);
  at::Tensor denseGradient(std::size_t parameter) const;
  void queueEnd();
  void beginBackward(std::size_t first);  // the parameter whose gradient has come
  bool isChanged(std::size_t bucket) const;
  bool isKept(std::size_t parameter, std::int64_t added = 0) const;
  void takeZeros();
  void checkUnchanged(std::size_t first);
  void backwardEnds();
  void noteVersions();
  [[noreturn]] void throwMissing();
  // In a backward pass: all ranks hear of it.
  [[noreturn]] void throwRefused(const std::string& text);
  void checkVersions() const;
  void checkStepping(std::size_t parameter) const;
  void checkAddresses() const;
  void postReady();
  void postReduceScatter(std::size_t bucket);
  void postGradientGathers();
  void postParameterGathers();
  void expectGathers();
  void gatherArrived(std::size_t bucket);
  void takeWhole(std::size_t bucket, const std::vector<at::Tensor>& locals);
  void rebuild();
  void fail(std::exception_ptr error);
  // Until nothing is on its way; throws the error of what failed.
  void waitExchanges();
  // After leave() throws: what failed, or that the group has ended.
  void checkNotLeft() const;
  bool isGathered(std::size_t parameter) const;
  double waitUntil(const char* what, const std::function<bool()>& ready);

  c10::intrusive_ptr<ProcessGroupDear> group_;
  const std::vector<at::Tensor> parameters_;
  const std::vector<std::string> names_;
  const bool replicated_;
  const bool unused_allowed_;
  std::vector<const void*> addresses_;
  DearPlanner planner_;
  c10::intrusive_ptr<ProcessGroupDear> lane_;
  std::unique_ptr<ShardTransport> transfers_;
  std::unique_ptr<ShardBuckets> buckets_;  // null under plain DDP, and after leave()
  std::vector<std::size_t> gather_order_;  // of buckets

  // A backward pass; autograd's thread, between them the training thread.
  bool armed_ = false;                 // the next one exchanges
  FlightRecord reduction_;             // of the next one, until its last bucket is posted
  bool end_queued_ = false;            // of the one under way
  bool started_ = false;               // gradients of it have come,
  bool complete_ = false;              //   and all: every bucket has been posted, gradient() may wait for them
  bool unstepped_ = false;             // reduce-scatters have been posted since the last step with gradients
  std::vector<at::Tensor> gradients_;  // [parameter] that have come and are not posted yet
  std::vector<char> seen_;             // [parameter]
  // Replicated form:
  bool gathered_ = false;             // the last pass' gradients are being gathered, or there,
  bool stepping_ = false;             //   and optimizer.step() has been called
  std::vector<at::Tensor> whole_;     // [parameter] gathered gradients; undefined: none
  std::vector<std::size_t> missing_;  // [bucket] gradients that have not come
  std::size_t next_bucket_ = 0;       // the first that has not been posted
  std::vector<std::int64_t> gradient_order_;
  std::vector<std::int64_t> forward_order_;
  std::vector<char> waited_;  // [parameter] since the all-gathers were posted
  std::vector<std::pair<const void*, std::int64_t>>
      versions_;  // [parameter] of .grad after the backward pass; replicated, then after the step
  std::int64_t steps_ = 0;
  bool detached_ = false;

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::vector<char> reducing_;         // [bucket] a reduce-scatter is posted and has not arrived
  std::vector<std::int64_t> arrived_;  // [bucket] the version of its buffer when the last one had
  std::vector<char> gathering_;        // [bucket] the same of an all-gather
  FlightRecord gather_record_;         // of all of them
  std::exception_ptr error_;
  DearStats stats_;
  std::atomic<int> gathering_count_{0};  // lets a module's pre-hook pass without the lock
  std::atomic<bool> failed_{false};

  std::uint64_t shutdown_callback_ = 0;
  std::uint64_t abort_callback_ = 0;
  std::unique_ptr<GradientHooks> hooks_;
  // Last: ends before what it uses. Null after leave(), which a signal's handler may call in any wait: who waits for it
  // keeps a copy.
  std::shared_ptr<ExchangeThread> exchange_;
};

}  // namespace torchext
