// DearPlanner chooses the size and order of a model's buckets, or plain all-reduce, from steps that rank 0 measures.
// All ranks get the same plan; core/dear/bucket_plan.h cuts the buckets.
//
// Course of a training run, in steps since attach (every rank counts alike, so that all know when a decision is due):
//   trial of all-reduce     where that may be fallen back on: plain DDP, measured for one window. Elsewhere a window
//                           that is not counted, for links take their first steps to come up to their rate
//   trials of bucket sizes  windows of a BayesianTuner, or a single one where the user has set the size
//   both in turn            where the best size and all-reduce are close: the first window of all-reduce was early, the
//                           best of many trials is a lucky one, and one median does not show rare stalls. Buckets must
//                           win by more than chance
//   what was best           with it training goes on. After 100, 200, 400 ... further steps it is seen whether a step
//                           takes longer now than all-reduce did: then both in turn once more
// With the first decision the observed orders of gradients and of forward waits replace the assumed ones.
//
// With buckets of a plan that was made before training there are no trials: a window of warm-up, then both in turn. If
// gradients do not come in the order of the planned buckets, these are given up, and the trials begin.
//
// Threads: the training thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <vector>

#include "c10d/backend/process_group_dear.h"
#include "core/dear/bayesian_tuner.h"

namespace torchext {

// Orders are positions in the synchronizer's list of tensors.
struct DearPlan {
  bool allreduce = false;  // plain DDP: everything else is without meaning
  std::size_t bucket_bytes = 0;
  std::vector<int> ends;  // of explicit buckets (core/dear/bucket_ends.h); empty: by bucket_bytes
  std::vector<std::int64_t> gradient_order;
  std::vector<std::int64_t> forward_order;
  bool hierarchical = false;  // the transport where the group's options leave it open; read when a model is attached
  friend bool operator==(const DearPlan&, const DearPlan&) = default;
};

class DearPlanner {
 public:
  // model_bytes: of all gradients. tensors: those that have gradients, in registration order. bucket_mb: MiB; 0: tuned.
  // planned: ends and orders of explicit buckets, the same on all ranks; bucket_mb does not count then.
  DearPlanner(ProcessGroupDear& group, std::size_t model_bytes, std::vector<std::int64_t> tensors, double bucket_mb,
              std::optional<DearPlan> planned = std::nullopt);

  const DearPlan& plan() const { return plan_; }

  // After every optimizer step. Collective when a decision is due: rank 0's is broadcast. True: plan() is new.
  // The orders in which this rank saw the last step's gradients and forward waits; incomplete ones are ignored.
  bool afterStep(const std::vector<std::int64_t>& gradient_order, const std::vector<std::int64_t>& forward_order);

  bool decided() const { return phase_ == Phase::kDecided; }
  const core::BayesianTunerState& trials() const { return tuner_.state(); }
  // Of the all-reduce's window; 0: not measured.
  double allreduceSeconds() const { return allreduce_seconds_; }

 private:
  enum class Phase : std::int64_t { kWarmUp, kAllreduce, kSettling, kTuning, kConfirming, kDecided };
  void decide(const std::vector<std::int64_t>& gradient_order, const std::vector<std::int64_t>& forward_order);
  bool usesPlan(const std::vector<std::int64_t>& gradient_order);
  void tune();
  void confirm();
  void settle(bool allreduce);
  void compareAgain();
  bool watch(double seconds);
  void share();
  void announce() const;

  ProcessGroupDear& group_;
  const std::vector<std::int64_t> tensors_;
  const bool fallback_;
  const bool fixed_;           // the bucket size is the user's
  const bool planned_;         // there were buckets of a plan
  core::BayesianTuner tuner_;  // reported to on rank 0 alone
  DearPlan plan_;
  Phase phase_ = Phase::kWarmUp;
  std::vector<double> window_;  // seconds of the phase's steps
  double allreduce_seconds_ = 0;
  double best_seconds_ = 0;
  std::vector<double> confirmed_[2];  // [all-reduce?] seconds of the steps of kConfirming
  std::int64_t watched_ = 0;          // steps since the decision or the last look at it,
  std::int64_t next_look_ = 0;        //   after so many there is one
  std::optional<std::chrono::steady_clock::time_point> last_step_;
};

}  // namespace torchext
