// DearSynchronizer trains an attached model with decoupled all-reduce (Zhang et al., "DeAR", ICDCS 2023):
// reduce-scatter of the gradients under the backward pass, all-gather under the next forward pass.
//   sharded     every rank steps its slice of every parameter, the parameters are gathered; the optimizer's state is
//               1 / world size
//   replicated  (the paper's) the gradients are gathered, and every rank steps each parameter before the forward pass
//               needs it; for optimizers that want whole gradients
//
// The way of a bucket in a training step, and the class of each stretch:
//   backward   gradientReady(i), for each parameter, adds to the BackwardPass; a bucket of which all gradients are
//              there goes to the BucketExchanges, buckets in one order on all ranks. DDP's reducer sleeps, as inside
//              no_sync(): it would copy every gradient into its buckets and back.
//   its end    onReduced() tells Python that averaged gradients are on their way. ReplicatedForm: the all-gathers of
//              the gradients are queued, in the order of the forward pass.
//              DearPlanner counts the pass, and may decide.
//   step       LocalGradients refuses what was not averaged. ShardedForm: the optimizer steps slices as they arrive,
//              then the all-gathers of the parameters are queued. ReplicatedForm: it has whole gradients.
//              Behind it the planner's decision is adopted. A rank that skips the step adopts it in front of the next
//              forward pass. In the sharded form no rank can skip alone: the others wait for the slices it steps.
//   forward    whatever reads a parameter calls waitTensors() first. Replicated: then Python steps it.
// While DearPlanner says so the model trains as plain DDP instead (allreduce()): its reducer is awake.
//
// A parameter that got no gradient travels as zeros with a mark; one that no rank has a gradient for has none (the
// optimizer skips it), as in single-process training.
//
// Threads: the training thread, autograd's (gradientReady, backwardEnds) and that of the exchanges, on which nothing of
// this class runs.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "c10d/backend/process_group_dear.h"
#include "ddp/common/synchronizer.h"
#include "ddp/dear/backward_pass.h"
#include "ddp/dear/bucket_exchanges.h"
#include "ddp/dear/dear_form.h"
#include "ddp/dear/dear_planner.h"
#include "ddp/dear/dear_stats.h"
#include "ddp/dear/gradient_hooks.h"
#include "ddp/dear/local_gradients.h"
#include "ddp/dear/replicated_form.h"
#include "ddp/dear/sharded_form.h"

namespace torchext {

class DearSynchronizer : public Synchronizer {
 public:
  using MakeDedicatedGroup = BucketExchanges::MakeDedicatedGroup;

  // Collective. parameters: the model's, in registration order; floating point, dense, on one device; the same shapes
  // and names on all ranks (checked). names: for messages. unused_allowed: a backward pass need not reach every
  // parameter (DDP's find_unused_parameters). bucket_mb: instead of the options'. planned: explicit buckets in place of
  // either, by their ends and orders; all trained parameters are in both orders. make_dedicated_group: makes a group of
  // the same ranks, whose collectives carry the exchanges and that nobody else uses; called when all ranks are known to
  // want one. None: point-to-point on `group`, on the CPU only.
  DearSynchronizer(c10::intrusive_ptr<ProcessGroupDear> group, std::vector<at::Tensor> parameters,
                   std::vector<std::string> names, bool unused_allowed, std::optional<double> bucket_mb,
                   std::optional<DearPlan> planned = std::nullopt, const MakeDedicatedGroup& make_dedicated_group = {});
  ~DearSynchronizer() override;

  // The last forward pass ran outside (true) or inside (false) no_sync().
  void expectBackward(bool exchanges);
  // In a hook of that forward pass's output: a backward pass begins. Without it the pass of the first gradient counts.
  void backwardBegins() { pass_.queueEnd(); }
  // Called at the end of a backward pass that averages, on autograd's thread.
  void onReduced(std::function<void()> callback) { on_reduced_ = std::move(callback); }

  // Whether the model trains as plain DDP. Changes in afterStep() and adoptPlan() only.
  bool allreduce() const { return planner_.plan().allreduce; }
  bool replicated() const { return replicated_; }
  // What the optimizer steps with, by form; c10::Error for the other.
  ShardedForm& shardedForm();
  ReplicatedForm& replicatedForm();
  const BucketExchanges& exchanges() const { return *exchanges_; }
  // Parameters that have been given other memory of the same layout (.data = ...) since the last call; from now on
  // that is theirs. Nothing may be under way. c10::Error for another layout, dtype or device.
  std::vector<std::int64_t> takeMoved();
  // As optimizer.zero_grad(): there is no averaged gradient to step with until the next backward pass.
  void clearGradients();

  void beforeStep() override;
  void afterStep() override;
  // Replicated form, in front of a forward pass outside of any step: what was decided in a pass whose step this rank
  // has skipped. Averaged gradients are the parameters' own by then (settleGradient). True: allreduce() may be another.
  bool adoptPlan();
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
  void backwardEnds();
  void planPass();
  void postReady();
  void rebuild();

  const c10::intrusive_ptr<ProcessGroupDear> group_;
  const std::vector<at::Tensor> parameters_;
  const std::vector<std::string> names_;
  const bool replicated_;
  const bool unused_allowed_;
  std::vector<const void*> addresses_;  // [parameter] see takeMoved()
  std::function<void()> on_reduced_;
  DearPlanner planner_;
  std::vector<std::int64_t> forward_order_;  // of waits since the last step
  std::vector<char> waited_;                 // [parameter] since the all-gathers were posted
  std::int64_t steps_ = 0;

  LocalGradients local_;
  BackwardPass pass_;
  std::unique_ptr<DearForm> form_;
  std::uint64_t shutdown_callback_ = 0;
  std::unique_ptr<GradientHooks> hooks_;
  std::unique_ptr<BucketExchanges> exchanges_;  // last: its thread ends before what it uses
};

}  // namespace torchext
