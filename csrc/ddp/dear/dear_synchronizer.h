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
//   its end    onReduced() tells Python that averaged gradients are on their way. Replicated: the all-gathers of the
//              gradients are queued, in the order of the forward pass; settleGradient(i) makes one the parameter's own.
//   step       sharded: ownGradient(i) waits for the bucket, and what has arrived is stepped before the rest
//              (arrivedBuckets()); afterStep() queues the all-gathers of the parameters. Replicated: gradient(i).
//   forward    whatever reads a parameter calls waitTensors() first. Replicated: then Python steps it.
// While DearPlanner says so the model trains as plain DDP instead (allreduce()): its reducer is awake.
//
// Gradients: sharded, the parameters' own .grad stay local; replicated, they become the averaged ones. A parameter that
// got no gradient travels as zeros with a mark; one that no rank has a gradient for has none (the optimizer skips it),
// as in single-process training.
// Gradient accumulation: only a backward pass whose forward ran outside no_sync() exchanges anything; then .grad holds
// the sum of all micro-batches. What another pass adds is this rank's own: checkAveraged() refuses to step with it.
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

#include "c10d/backend/process_group_dear.h"
#include "c10d/transport/shard_transport.h"
#include "ddp/common/synchronizer.h"
#include "ddp/dear/dear_planner.h"
#include "ddp/dear/exchange_thread.h"
#include "ddp/dear/gradient_hooks.h"
#include "ddp/dear/shard_buckets.h"

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
  using MakeDedicatedGroup = std::function<c10::intrusive_ptr<ProcessGroupDear>()>;

  // Collective. parameters: the model's, in registration order; floating point, dense, on one device; the same shapes
  // and names on all ranks (checked). names: for messages. unused_allowed: a backward pass need not reach every
  // parameter (DDP's find_unused_parameters). bucket_mb: instead of the options'. make_dedicated_group: makes a group
  // of the same ranks, whose collectives carry the exchanges and that nobody else uses; called when all ranks are known
  // to want one. None: point-to-point on `group`, on the CPU only.
  DearSynchronizer(c10::intrusive_ptr<ProcessGroupDear> group, std::vector<at::Tensor> parameters,
                   std::vector<std::string> names, bool unused_allowed, std::optional<double> bucket_mb,
                   const MakeDedicatedGroup& make_dedicated_group = {});
  ~DearSynchronizer() override;

  // The last forward pass ran outside (true) or inside (false) no_sync().
  void expectBackward(bool exchanges);
  // In a hook of that forward pass's output: a backward pass begins. Without it the pass of the first gradient counts.
  void backwardBegins() { queueEnd(); }
  // Called at the end of a backward pass that averages, on autograd's thread.
  void onReduced(std::function<void()> callback) { on_reduced_ = std::move(callback); }
  // Sharded: called when a later pass is about to add to gradients that onReduced() has told of and no step has used.
  void onAccumulating(std::function<void()> callback) { on_accumulating_ = std::move(callback); }

  // Whether the model trains as plain DDP. Changes in afterStep() only.
  bool allreduce() const { return planner_.plan().allreduce; }
  bool replicated() const { return replicated_; }
  // Whether another rank waits for gradients of a step that this one has not begun: it will not come to a collective
  // that this rank waits in.
  bool othersTrainOn() const;
  // What the optimizer steps, sharing memory with the parameter: this rank's slice (1-D, in memory order), or all of
  // it.
  at::Tensor stepped(std::size_t parameter) const;
  // Sharded: this rank's slice of the averaged gradient, a view of the staging buffer, valid until afterStep(). Waits
  // for it; none when no rank has one.
  std::optional<at::Tensor> ownGradient(std::size_t parameter);
  // This rank's slice of any tensor of the parameter's shape: 1-D, in the parameter's memory order. A view if possible.
  at::Tensor ownSliceOf(std::size_t parameter, const at::Tensor& whole) const;
  // Replicated: the averaged gradient, valid until the next backward pass. Waits for it; none when no rank has one.
  std::optional<at::Tensor> gradient(std::size_t parameter);
  // Replicated: makes it the parameter's own.
  void settleGradient(std::size_t parameter);
  // Throws if a parameter's own gradient is this rank's alone, and not zero: ranks would step apart.
  void checkAveraged() const;
  // Parameters that have been given other memory of the same layout (.data = ...) since the last call; from now on
  // that is theirs. Nothing may be under way. c10::Error for another layout, dtype or device.
  std::vector<std::int64_t> takeMoved();
  // Buckets come in the order of the backward pass. arrivedBuckets(): how many have; waits until it is more than
  // `known`, or all. bucketOf(): none for what is not exchanged.
  std::size_t bucketCount() const { return reducing_.size(); }
  std::optional<std::size_t> bucketOf(std::size_t parameter) const;
  std::size_t arrivedBuckets(std::size_t known);
  // As optimizer.zero_grad(): there is no averaged gradient to step with until the next backward pass. What gradient()
  // gives for a step that has been called already stays.
  void clearGradients();
  // Sharded: a script has changed averaged gradients, and a step has used them up. The parameters' own do not have the
  // change; a pass that adds to them raises.
  void noteLostChange() { lost_change_ = true; }

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
  void beforeAccumulation(std::size_t parameter);
  at::Tensor denseGradient(std::size_t parameter) const;
  void queueEnd();
  void beginBackward();
  void backwardEnds();
  void noteVersions();
  void noteLocal();
  [[noreturn]] void throwMissing();
  // In a backward pass: all ranks hear of it.
  [[noreturn]] void throwRefused(const std::string& text);
  void checkNotLost(std::size_t parameter);
  void checkVersions() const;
  void checkVersion(std::size_t parameter) const;
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
  std::int64_t begun() const { return taken_ + (unstepped_ ? 1 : 0); }  // steps, by their backward passes

  c10::intrusive_ptr<ProcessGroupDear> group_;
  const std::vector<at::Tensor> parameters_;
  const std::vector<std::string> names_;
  const bool replicated_;
  const bool unused_allowed_;
  std::vector<const void*> addresses_;
  std::function<void()> on_reduced_;
  std::function<void()> on_accumulating_;
  DearPlanner planner_;
  c10::intrusive_ptr<ProcessGroupDear> dedicated_group_;
  std::unique_ptr<ShardTransport> transfers_;
  std::unique_ptr<ShardBuckets> buckets_;  // null under plain DDP, and after leave()
  std::vector<std::size_t> gather_order_;  // of buckets

  // A backward pass; autograd's thread, between them the training thread.
  bool armed_ = false;                 // the next one exchanges
  FlightRecord reduction_;             // of the next one, until its last bucket is posted
  bool end_queued_ = false;            // of the one under way
  bool started_ = false;               // gradients of it have come,
  bool complete_ = false;              //   and all: every bucket has been posted, gradient() may wait for them
  bool accumulating_ = false;          //   and after that another pass has added to them
  bool lost_change_ = false;           // see noteLostChange(); until afterStep()
  bool unstepped_ = false;             // reduce-scatters have been posted since the last step with gradients
  std::vector<at::Tensor> gradients_;  // [parameter] that have come and are not posted yet
  std::vector<char> seen_;             // [parameter]
  std::vector<const void*> lost_;      // [parameter] memory of a gradient without a change; empty: none
  std::vector<const void*> local_;     // [parameter] memory of a gradient that is this rank's alone
  // Replicated form:
  bool gathered_ = false;             // the last pass' gradients are being gathered, or there
  std::vector<char> settled_;         // [parameter] its own gradient is the gathered one
  std::vector<at::Tensor> whole_;     // [parameter] gathered gradients; undefined: none
  std::vector<std::size_t> missing_;  // [bucket] gradients that have not come
  std::size_t next_bucket_ = 0;       // the first that has not been posted
  std::vector<std::int64_t> gradient_order_;
  std::vector<std::int64_t> forward_order_;
  std::vector<char> waited_;                                    // [parameter] since the all-gathers were posted
  std::vector<std::pair<const void*, std::int64_t>> versions_;  // [parameter] of .grad after the backward pass
  int channel_ = 0;
  std::int64_t steps_ = 0;
  std::int64_t taken_ = 0;  // steps since attach, whatever setSteps() says
  bool detached_ = false;

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::vector<char> reducing_;   // [bucket] a reduce-scatter is posted and has not arrived
  std::vector<char> gathering_;  // [bucket] the same of an all-gather
  FlightRecord gather_record_;   // of all of them
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
