#include "core/dear/bayesian_tuner.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <map>
#include <numbers>
#include <utility>

#include "core/base/check.h"
#include "core/dear/step_times.h"

namespace torchext::core {
namespace {

constexpr double kMb = 1 << 20;
constexpr double kMostMb = 256;
constexpr double kLeastMb = 1;
constexpr double kLeastRange = 32;  // max_mb / min_mb of forModel, at least

// Places where expected improvement is computed: finer than any difference between two bucket limits that matters.
constexpr int kCandidates = 128;
// Places of the first trials as shares of the range, besides the starting point. The upper end is among them because
// there the plan changes most: few buckets become one. A place that is nearer than kNear to a trial says nothing new.
constexpr std::array<double, 4> kInitial{1.0 / 6, 5.0 / 6, 1.0 / 2, 1.0};
constexpr double kNear = 1.0 / 8;

// What step times look like: logarithms that vary by 5 % to a factor of e, over 1/8 to 1/3 of the range. With a handful
// of trials the likelihood alone would sometimes say that all is noise, or that one slope spans the range: large
// tensors make plateaus with cliffs between them.
constexpr SearchRange kSignalVariance{0.05 * 0.05, 1.0};
constexpr SearchRange kLengthScale{1.0 / 8, 1.0 / 3};
// Standard deviation of a window's median that is never undercut: clocks, other processes.
constexpr double kLeastNoise = 0.002;
// Windows differ by more than their steps do; up to this factor in variance.
constexpr double kMostNoise = 16;

// Before the search ends on the best limit, it and the next ones that may be as good, as far as noise lets one tell,
// are measured again; more of them and more often where a window's standard deviation is above half of
// stop_improvement.
struct Confirmation {
  std::size_t contenders;
  int repeats;
};
constexpr Confirmation kConfirmation{2, 2};
constexpr Confirmation kNoisyConfirmation{3, 3};

double normalCdf(double z) { return 0.5 * std::erfc(-z / std::numbers::sqrt2); }

void check(const BayesianTunerOptions& options) {
  checkPositive("min_mb", options.min_mb);
  if (!std::isfinite(options.max_mb) || options.max_mb < options.min_mb) {
    throwInvalid("max_mb", options.max_mb, concat("finite, ", options.min_mb, " (min_mb) or more"));
  }
  checkPositive("start_mb", options.start_mb);
  if (options.max_trials < 1) {
    throwInvalid("max_trials", options.max_trials, "1 or more");
  }
  if (options.window_steps < 1) {
    throwInvalid("window_steps", options.window_steps, "1 or more");
  }
  if (!(options.stop_improvement >= 0 && options.stop_improvement <= 1)) {
    throwInvalid("stop_improvement", options.stop_improvement, "0..1");
  }
}

void check(const TunerTrial& trial, const BayesianTunerOptions& options) {
  if (!(trial.bucket_mb >= options.min_mb && trial.bucket_mb <= options.max_mb)) {
    throwInvalid("bucket_mb of a trial", trial.bucket_mb, concat(options.min_mb, "..", options.max_mb));
  }
  checkPositive("step_seconds of a trial", trial.step_seconds);
  if (!std::isfinite(trial.noise_variance) || trial.noise_variance < 0) {
    throwInvalid("noise_variance of a trial", trial.noise_variance, "finite, 0 or more");
  }
}

// Trials as the process sees them.
struct Points {
  explicit Points(const std::vector<TunerTrial>& trials) {
    for (const TunerTrial& trial : trials) {
      x.push_back(std::log2(trial.bucket_mb));
      y.push_back(std::log(trial.step_seconds));
    }
  }
  std::vector<double> x;
  std::vector<double> y;
};

// The least noise variance that a window's median is believed to have. Every window's spread and every repeat of a
// limit is one estimate of it.
double noiseVariance(const std::vector<TunerTrial>& trials, const std::vector<double>& x,
                     const std::vector<double>& y) {
  const RepeatNoise repeats = noiseFromRepeats(x, y);
  double sum = repeats.variance * repeats.degrees_of_freedom;
  for (const TunerTrial& trial : trials) {
    sum += trial.noise_variance;
  }
  const auto estimates = static_cast<double>(trials.size()) + repeats.degrees_of_freedom;
  return std::max(kLeastNoise * kLeastNoise, sum / estimates);
}

}  // namespace

BayesianTunerOptions BayesianTunerOptions::forModel(std::size_t model_bytes) {
  if (model_bytes == 0) {
    throwInvalid("model_bytes", model_bytes, "1 or more");
  }
  BayesianTunerOptions options;
  options.max_mb = std::min(kMostMb, static_cast<double>(model_bytes) / kMb);
  options.min_mb = std::min(kLeastMb, options.max_mb / kLeastRange);
  return options;
}

BayesianTuner::BayesianTuner(const BayesianTunerOptions& options, BayesianTunerState state)
    : options_(options), state_(std::move(state)) {
  check(options_);
  for (const TunerTrial& trial : state_.trials) {
    check(trial, options_);
  }
  low_ = std::log2(options_.min_mb);
  high_ = std::log2(options_.max_mb);
  decide();
}

bool BayesianTuner::report(double step_seconds) {
  checkPositive("step_seconds", step_seconds);
  if (done_) {
    return false;
  }
  window_.push_back(step_seconds);
  if (window_.size() <= index(options_.window_steps)) {
    return false;
  }
  state_.trials.push_back(closeWindow());
  decide();
  return true;
}

TunerTrial BayesianTuner::closeWindow() {
  window_.erase(window_.begin());
  TunerTrial trial{proposal_mb_, median(window_), 0};
  std::vector<double> deviations;
  std::transform(window_.begin(), window_.end(), std::back_inserter(deviations),
                 [&](double seconds) { return std::abs(std::log(seconds / trial.step_seconds)); });
  // From the median of deviations, for one hiccup must not pass for noise: 1.4826 of it is the standard deviation of
  // normal noise, and the variance of a median of n is pi / 2n of that of one.
  const double deviation = 1.4826 * median(std::move(deviations));
  trial.noise_variance = std::numbers::pi / 2 * deviation * deviation / static_cast<double>(window_.size());
  window_.clear();
  return trial;
}

std::vector<BayesianTuner::Ranked> BayesianTuner::ranking() const {
  // [limit] sums over its trials
  std::map<double, Ranked> seen;
  for (const TunerTrial& trial : state_.trials) {
    Ranked& place = seen[trial.bucket_mb];
    place.trial.bucket_mb = trial.bucket_mb;
    place.trial.step_seconds += std::log(trial.step_seconds);
    place.trial.noise_variance += trial.noise_variance;
    ++place.count;
  }
  // The process knows nothing of a range of which only a few places have been seen.
  const std::optional<GaussianProcess> process =
      state_.trials.size() > kInitial.size() ? std::make_optional(fitted()) : std::nullopt;
  std::vector<Ranked> ranked;
  for (auto [mb, place] : seen) {
    const double mean = place.trial.step_seconds / place.count;
    place.trial.step_seconds = std::exp(process ? process->at(std::log2(mb)).mean : mean);
    place.trial.noise_variance /= place.count * place.count;
    ranked.push_back(place);
  }
  std::stable_sort(ranked.begin(), ranked.end(),
                   [](const Ranked& a, const Ranked& b) { return a.trial.step_seconds < b.trial.step_seconds; });
  return ranked;
}

std::optional<TunerTrial> BayesianTuner::best() const {
  const auto ranked = ranking();
  return ranked.empty() ? std::nullopt : std::make_optional(ranked.front().trial);
}

// The next proposal is a function of options and trials alone: this is what makes a restored tuner go on alike.
void BayesianTuner::decide() {
  const double start_mb = std::clamp(options_.start_mb, options_.min_mb, options_.max_mb);
  const auto ranked = ranking();
  if (state_.trials.size() >= index(options_.max_trials) || high_ <= low_) {
    done_ = true;
    proposal_mb_ = ranked.empty() ? start_mb : ranked.front().trial.bucket_mb;
    return;
  }
  if (ranked.empty()) {
    proposal_mb_ = start_mb;
    return;
  }
  if (const auto initial = initialPoint()) {
    proposal_mb_ = *initial;
    return;
  }
  const double promising = mostPromising();
  if (expected_improvement_ >= options_.stop_improvement) {
    proposal_mb_ = promising;
    return;
  }
  // The best of several noisy measurements looks better than it is.
  const double deviation = std::sqrt(noise());
  const double close = ranked.front().trial.step_seconds * (1 + std::max(options_.stop_improvement, deviation));
  const Confirmation& wanted = deviation > options_.stop_improvement / 2 ? kNoisyConfirmation : kConfirmation;
  int fewest = wanted.repeats;
  done_ = true;
  proposal_mb_ = ranked.front().trial.bucket_mb;
  for (std::size_t i = 0; i < std::min(wanted.contenders, ranked.size()); ++i) {
    if (ranked[i].trial.step_seconds <= close && ranked[i].count < fewest) {
      fewest = ranked[i].count;
      proposal_mb_ = ranked[i].trial.bucket_mb;
      done_ = false;
    }
  }
}

std::optional<double> BayesianTuner::initialPoint() const {
  for (const double share : kInitial) {
    const double point = low_ + share * (high_ - low_);
    const bool is_near = std::any_of(state_.trials.begin(), state_.trials.end(), [&](const TunerTrial& trial) {
      return std::abs(std::log2(trial.bucket_mb) - point) < kNear * (high_ - low_);
    });
    if (!is_near) {
      return std::clamp(std::exp2(point), options_.min_mb, options_.max_mb);
    }
  }
  return std::nullopt;
}

double BayesianTuner::noise() const {
  const Points points(state_.trials);
  return noiseVariance(state_.trials, points.x, points.y);
}

GaussianProcess BayesianTuner::fitted() const {
  const Points points(state_.trials);
  const double width = high_ - low_;
  const double least = noise();
  return fitGaussianProcess(
      points.x, points.y,
      {{kLengthScale.low * width, kLengthScale.high * width}, kSignalVariance, {least, kMostNoise * least}});
}

// The limit of the largest expected improvement, which is kept.
double BayesianTuner::mostPromising() {
  const double width = high_ - low_;
  const GaussianProcess process = fitted();
  // What the best trial is believed to take, not what it was lucky to take.
  double best = process.at(std::log2(state_.trials.front().bucket_mb)).mean;
  for (const TunerTrial& trial : state_.trials) {
    best = std::min(best, process.at(std::log2(trial.bucket_mb)).mean);
  }
  double promising = low_;
  expected_improvement_ = -1;
  for (int i = 0; i <= kCandidates; ++i) {
    const double candidate = low_ + width * i / kCandidates;
    const Posterior posterior = process.at(candidate);
    const double improvement = expectedRelativeImprovement(posterior.mean, posterior.variance, best);
    if (improvement > expected_improvement_) {
      expected_improvement_ = improvement;
      promising = candidate;
    }
  }
  return std::clamp(std::exp2(promising), options_.min_mb, options_.max_mb);
}

double expectedRelativeImprovement(double mean, double variance, double best) {
  const double deviation = std::sqrt(variance);
  if (deviation == 0) {
    return std::max(0.0, 1 - std::exp(mean - best));
  }
  const double z = (best - mean) / deviation;
  return std::max(0.0, normalCdf(z) - std::exp(mean - best + variance / 2) * normalCdf(z - deviation));
}

}  // namespace torchext::core
