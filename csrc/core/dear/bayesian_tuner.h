// BayesianTuner finds the bucket size that trains fastest, by Bayesian optimization on the training steps themselves
// (Zhang et al., "DeAR", ICDCS 2023: dynamic tensor fusion).
//
// The search variable is log2 of the bucket limit in MB (2^20 bytes), the measured one log of the step time, so that
// all improvements are relative. A Gaussian process (gaussian_process.h) is fitted to the trials so far; the next trial
// is where the expected relative improvement over the best of them is largest. The search ends when no place promises
// stop_improvement any more and the best has been measured twice, and so have those that may be as good, thrice where
// windows are noisy; or when max_trials are spent. Trials change the fusion plan only, never the result of a training
// step.
//
// Ask and tell, on rank 0 alone; the other ranks hear the limit from it and apply it at the same step:
//   BayesianTuner tuner(BayesianTunerOptions::forModel(bytes));
//   each step:  seconds = train one step with bucket limit tuner.propose();
//               if (tuner.report(seconds)) tell all ranks tuner.propose();
// Deterministic: equal options, state and reports give equal proposals. Not thread-safe.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "core/dear/gaussian_process.h"

namespace torchext::core {

struct BayesianTunerOptions {
  // Bounds of the bucket limit in MB: finite, above 0. Equal ones leave nothing to tune.
  double min_mb = 1;
  double max_mb = 256;
  // First trial, in MB: finite, above 0, moved to the nearest bound where it is outside. By default DDP's bucket limit.
  double start_mb = 25;
  // 1 or more.
  int max_trials = 12;
  // Steps of a trial that count: 1 or more. One more is made before them and discarded, for it pays for the new plan.
  int window_steps = 10;
  // The search ends when the expected relative improvement is below this: in 0..1.
  double stop_improvement = 0.02;

  // Bounds for a model with that many bytes of gradients (1 or more): a limit above them changes nothing, and 1 MB is
  // no small bucket in a small model. 1..256 MB for 256 MB and more.
  static BayesianTunerOptions forModel(std::size_t model_bytes);
};

// One window of steps at one bucket limit.
struct TunerTrial {
  double bucket_mb = 0;
  double step_seconds = 0;    // median of the window
  double noise_variance = 0;  // of log(step_seconds), from the spread of the window's steps; 0 for a window of one
  friend bool operator==(const TunerTrial&, const TunerTrial&) = default;
};

// All that a tuner knows, for checkpoints and statistics. An unfinished window is not part of it: steps before and
// after a restart do not belong together.
struct BayesianTunerState {
  std::vector<TunerTrial> trials;  // in order
  friend bool operator==(const BayesianTunerState&, const BayesianTunerState&) = default;
};

class BayesianTuner {
 public:
  // Goes on from `state`, whose trials must lie in the bounds with step_seconds above 0 and noise_variance 0 or more,
  // all finite. std::invalid_argument on those and on bad options.
  explicit BayesianTuner(const BayesianTunerOptions& options, BayesianTunerState state = {});

  // Bucket limit in MB of the current window; once done, that of the best trial.
  double propose() const { return proposal_mb_; }

  // The duration of a step made with propose(), finite and above 0 (std::invalid_argument otherwise, and the step is
  // not counted). True when that was the last of a window: propose() and done() have new answers. That is every
  // window_steps + 1 steps, on which other ranks can rely. A window's end costs O(trials^3), below a millisecond or so
  // a trial; other calls nothing. Once done, reports are ignored.
  bool report(double step_seconds);
  bool done() const { return done_; }

  // The tried limit of least step_seconds, as it is believed to be: by the process, which its neighbours inform, too;
  // of the first few trials by the geometric mean of its own. Without trials none.
  std::optional<TunerTrial> best() const;
  // The largest expected relative improvement over the best, as of the last decision; 1 before anything is known.
  double expectedImprovement() const { return expected_improvement_; }
  const BayesianTunerState& state() const { return state_; }

 private:
  // All trials of one limit: the step_seconds that are believed, and the noise of their mean.
  struct Ranked {
    TunerTrial trial;
    int count = 0;
  };
  // By step_seconds, the best first; of equal ones the smaller limit.
  std::vector<Ranked> ranking() const;

  void decide();
  std::optional<double> initialPoint() const;
  double noise() const;
  GaussianProcess fitted() const;
  double mostPromising();
  TunerTrial closeWindow();

  BayesianTunerOptions options_;
  BayesianTunerState state_;
  double low_;  // log2 of the bounds
  double high_;
  std::vector<double> window_;  // seconds of the current window's steps, the discarded one included
  double proposal_mb_ = 0;
  double expected_improvement_ = 1;
  bool done_ = false;
};

// E[max(0, 1 - exp(f - best))] for f ~ N(mean, variance): the share of the step time exp(best) that a trial is expected
// to save when f is the logarithm of its step time. In 0..1.
double expectedRelativeImprovement(double mean, double variance, double best);

}  // namespace torchext::core
