// DearPlanner chooses the size and order of a model's buckets, or plain all-reduce, from steps that rank 0 measures.
// All ranks get the same plan; core/dear/bucket_plan.h cuts the buckets.
//
// A decision is due after so many backward passes whose gradients were averaged. All ranks make these equally often;
// steps they need not. Time is taken at the end of the first such pass behind each step of rank 0: that is a measured
// step. Where too few are measured when a decision is due, the window goes on for as many passes again.
//
// Course of a training run, in steps since attach:
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
// Threads: the training thread; in a backward pass autograd's (afterPass, decide).
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

  // What is in use, since adopt().
  const DearPlan& plan() const { return used_; }

  // At the end of every backward pass whose gradients were averaged. True: a decision is due, and decide() follows.
  bool afterPass();
  // Collective: rank 0's decision is broadcast. The orders in which this rank saw the last gradients and forward waits;
  // incomplete ones are ignored.
  void decide(const std::vector<std::int64_t>& gradient_order, const std::vector<std::int64_t>& forward_order);
  // A step was taken here.
  void afterStep() { stepped_ = true; }
  // On all ranks before the next such pass begins: plan() is what was decided. True: it is new.
  bool adopt();

  bool decided() const { return phase_ == Phase::kDecided; }
  // For good: passes need not be told any more.
  bool settled() const { return decided() && (!fallback_ || plan_.allreduce); }
  const core::BayesianTunerState& trials() const { return tuner_.state(); }
  // Of the all-reduce's window; 0: not measured.
  double allreduceSeconds() const { return allreduce_seconds_; }

 private:
  enum class Phase : std::int64_t { kWarmUp, kAllreduce, kSettling, kTuning, kConfirming, kDecided };
  void choose(const std::vector<std::int64_t>& gradient_order, const std::vector<std::int64_t>& forward_order);
  bool usesPlan(const std::vector<std::int64_t>& gradient_order);
  void tune();
  void confirm();
  void settle(bool allreduce);
  void compareAgain();
  std::int64_t due() const;
  void measure();
  bool enoughMeasured() const;
  void lookAgain();
  void share();
  void announce() const;

  ProcessGroupDear& group_;
  const std::vector<std::int64_t> tensors_;
  const bool fallback_;
  const bool fixed_;           // the bucket size is the user's
  const bool planned_;         // there were buckets of a plan
  core::BayesianTuner tuner_;  // reported to on rank 0 alone
  DearPlan plan_;              // decided
  DearPlan used_;
  Phase phase_ = Phase::kWarmUp;
  std::int64_t passes_ = 0;     // since a decision was due
  std::int64_t next_look_;      // after so many passes what was decided is looked at
  bool stepped_ = true;         // since the last measured step began
  std::vector<double> window_;  // rank 0: seconds of the phase's steps
  double allreduce_seconds_ = 0;
  double best_seconds_ = 0;
  std::vector<double> confirmed_[2];  // [all-reduce?] seconds of the steps of kConfirming
  std::optional<std::chrono::steady_clock::time_point> last_measured_;
};

}  // namespace torchext
