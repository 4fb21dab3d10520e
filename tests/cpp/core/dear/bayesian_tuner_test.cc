// What the tuner promises whatever the step times are. How well it tunes: bayesian_tuner_oracle_test.cc.
#include "core/dear/bayesian_tuner.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <numbers>
#include <stdexcept>
#include <utility>
#include <vector>

#include "core/base/random.h"
#include "tests/cpp/core/base/expect_throw.h"

namespace torchext::core {
namespace {

using Landscape = std::function<double(double)>;  // step seconds at a bucket limit in MB

// Reports one window of equal steps.
void reportWindow(BayesianTuner& tuner, const BayesianTunerOptions& options, double seconds) {
  for (int step = 0; step < options.window_steps; ++step) {
    ASSERT_FALSE(tuner.report(seconds));
  }
  ASSERT_TRUE(tuner.report(seconds));
}

void runToEnd(BayesianTuner& tuner, const BayesianTunerOptions& options, const Landscape& seconds) {
  while (!tuner.done()) {
    reportWindow(tuner, options, seconds(tuner.propose()));
  }
}

// A parabola in log2 of the limit, least at best_mb.
Landscape valley(double best_mb, double depth) {
  return [=](double mb) { return 0.2 * (1 + depth * std::pow(std::log2(mb / best_mb), 2)); };
}

TEST(BayesianTuner, AWindowIsTheMedianWithoutItsFirstStep) {
  BayesianTunerOptions options;
  options.window_steps = 4;
  BayesianTuner tuner(options);
  EXPECT_EQ(tuner.propose(), 25);
  EXPECT_FALSE(tuner.best().has_value());
  for (const double seconds : {100.0, 1.0, 9.0, 2.0}) {
    EXPECT_FALSE(tuner.report(seconds));
    EXPECT_EQ(tuner.propose(), 25);
  }
  EXPECT_TRUE(tuner.report(4));
  ASSERT_EQ(tuner.state().trials.size(), 1U);
  const TunerTrial trial = tuner.state().trials[0];
  EXPECT_EQ(trial.bucket_mb, 25);
  EXPECT_DOUBLE_EQ(trial.step_seconds, 3);  // of 1, 2, 4, 9
  // Deviations from 3 as logarithms: 1.099, 0.405, 0.288, 1.099, their median 0.752.
  const double deviation = 1.4826 * (std::log(3.0) + std::log(1.5)) / 2;
  EXPECT_NEAR(trial.noise_variance, std::numbers::pi / 8 * deviation * deviation, 1e-12);
  EXPECT_NE(tuner.propose(), 25);
  EXPECT_EQ(tuner.best()->bucket_mb, 25);
}

TEST(BayesianTuner, ScalesItsRangeToTheModel) {
  const auto large = BayesianTunerOptions::forModel(std::size_t{5} << 30U);
  EXPECT_EQ(large.min_mb, 1);
  EXPECT_EQ(large.max_mb, 256);
  const auto middle = BayesianTunerOptions::forModel(std::size_t{97} << 20U);
  EXPECT_EQ(middle.min_mb, 1);
  EXPECT_EQ(middle.max_mb, 97);
  const auto small = BayesianTunerOptions::forModel(std::size_t{1} << 20U);
  EXPECT_EQ(small.min_mb, 1.0 / 32);
  EXPECT_EQ(small.max_mb, 1);
  EXPECT_EQ(BayesianTuner(small).propose(), 1);  // 25 MB, moved into the range
  EXPECT_THROW_MESSAGE(BayesianTunerOptions::forModel(0), std::invalid_argument, "model_bytes = 0");
}

TEST(BayesianTuner, FindsTheBottomOfAValley) {
  for (const double best_mb : {1.0, 2.0, 6.0, 25.0, 70.0, 256.0}) {
    for (const double depth : {0.01, 0.03, 0.2}) {
      const BayesianTunerOptions options;
      BayesianTuner tuner(options);
      const Landscape landscape = valley(best_mb, depth);
      runToEnd(tuner, options, landscape);
      EXPECT_LE(landscape(tuner.propose()), 1.03 * landscape(best_mb)) << best_mb << " MB, depth " << depth;
    }
  }
}

// Nothing to gain: the first trials and a confirmation, then it is over.
TEST(BayesianTuner, StopsWhenNothingIsToBeGained) {
  const BayesianTunerOptions options;
  BayesianTuner tuner(options);
  EXPECT_EQ(tuner.expectedImprovement(), 1);
  runToEnd(tuner, options, [](double) { return 0.125; });
  EXPECT_LE(tuner.state().trials.size(), 6U);
  EXPECT_LT(tuner.expectedImprovement(), 0.02);
  EXPECT_FALSE(tuner.report(7));  // ignored
  EXPECT_DOUBLE_EQ(tuner.best()->step_seconds, 0.125);
}

TEST(BayesianTuner, SpendsAllTrialsWhereAnyImprovementCounts) {
  BayesianTunerOptions options;
  options.stop_improvement = 0;
  options.max_trials = 9;
  BayesianTuner tuner(options);
  runToEnd(tuner, options, valley(10, 0.1));
  EXPECT_EQ(tuner.state().trials.size(), 9U);
}

TEST(BayesianTuner, EqualBoundsLeaveNothingToTune) {
  BayesianTunerOptions options;
  options.min_mb = options.max_mb = 8;
  const BayesianTuner tuner(options);
  EXPECT_TRUE(tuner.done());
  EXPECT_EQ(tuner.propose(), 8);
}

// Only ratios of step times matter.
TEST(BayesianTuner, IsIndifferentToTheUnitOfTime) {
  const BayesianTunerOptions options;
  BayesianTuner seconds(options);
  BayesianTuner hours(options);
  const Landscape landscape = valley(7, 0.05);
  runToEnd(seconds, options, landscape);
  runToEnd(hours, options, [&](double mb) { return landscape(mb) / 3600; });
  ASSERT_EQ(seconds.state().trials.size(), hours.state().trials.size());
  EXPECT_DOUBLE_EQ(seconds.propose(), hours.propose());
}

// A limit that looked good once and bad later must not stay the best.
TEST(BayesianTuner, RepeatsCountTogether) {
  BayesianTunerOptions options;
  options.max_trials = 4;
  const BayesianTuner tuner(options, {{{4, 1.0, 0}, {16, 0.9, 0}, {64, 1.1, 0}, {16, 1.44, 0}}});
  EXPECT_TRUE(tuner.done());
  EXPECT_EQ(tuner.propose(), 4);
  const BayesianTuner other(options, {{{4, 1.2, 0}, {16, 0.9, 0}, {64, 1.1, 0}, {16, 1.0, 0}}});
  EXPECT_EQ(other.propose(), 16);
  EXPECT_NEAR(other.best()->step_seconds, std::sqrt(0.9), 1e-12);
}

// The limit on which a search ends because nothing better is expected, and one that is almost as good, have been
// measured twice; bad ones have not.
TEST(BayesianTuner, ConfirmsTheBestAndItsRunnerUp) {
  const BayesianTunerOptions options;
  BayesianTuner tuner(options);
  const Landscape landscape = valley(36, 0.01);
  runToEnd(tuner, options, landscape);
  std::map<double, int> measured;  // [step seconds]
  for (const TunerTrial& trial : tuner.state().trials) {
    ++measured[trial.step_seconds];
  }
  ASSERT_LT(tuner.state().trials.size(), 12U);
  ASSERT_EQ(measured.begin()->first, landscape(tuner.propose()));
  EXPECT_EQ(measured.begin()->second, 2);
  ASSERT_LT(std::next(measured.begin())->first, 1.02 * measured.begin()->first);
  EXPECT_EQ(std::next(measured.begin())->second, 2);
  EXPECT_EQ(measured.rbegin()->second, 1);
}

// Neighbours say what a limit takes, too: the lucky one of a plain slope is not believed.
TEST(BayesianTuner, ALuckyTrialIsNotBelieved) {
  BayesianTunerOptions options;
  options.max_trials = 7;
  const double noise = 0.03 * 0.03;
  const BayesianTuner tuner(options, {{{2, 1.30, noise},
                                       {8, 1.06, noise},
                                       {16, 1.00, noise},
                                       {20, 1.03, noise},
                                       {32, 1.02, noise},
                                       {128, 0.99, noise},
                                       {200, 1.20, noise}}});
  ASSERT_TRUE(tuner.done());
  EXPECT_LT(tuner.propose(), 64);
  EXPECT_GT(tuner.best()->step_seconds, 0.99);
}

// Noisy windows: the best and those beside it are measured three times before the search ends.
TEST(BayesianTuner, ConfirmsMoreOftenWhereItIsNoisy) {
  const BayesianTunerOptions options;
  BayesianTuner tuner(options);
  Random random(7);
  runToEnd(tuner, options,
           [&](double mb) { return valley(36, 0.2)(mb) * (1 + 0.12 * (random.uniform() - random.uniform())); });
  std::map<double, int> measured;  // [limit]
  for (const TunerTrial& trial : tuner.state().trials) {
    ++measured[trial.bucket_mb];
  }
  EXPECT_TRUE(measured[tuner.propose()] == 3 || tuner.state().trials.size() == 12U) << measured[tuner.propose()];
  EXPECT_GT(tuner.state().trials.size(), 6U);
}

// Wild landscapes with steps, noise and hiccups: whatever they are, the promises hold.
class Wild {
 public:
  explicit Wild(std::uint64_t seed) : random_(seed) {
    for (double& level : levels_) {
      level = std::exp(2 * random_.uniform());
    }
    options_.min_mb = std::exp2(4 * random_.uniform() - 3);
    options_.max_mb = options_.min_mb * std::exp2(0.1 + 8 * random_.uniform());
    options_.start_mb = std::exp2(10 * random_.uniform() - 2);
    options_.max_trials = 1 + static_cast<int>(random_.below(12));
    options_.window_steps = 1 + static_cast<int>(random_.below(7));
    options_.stop_improvement = 0.05 * random_.uniform();
  }
  const BayesianTunerOptions& options() const { return options_; }
  double step(double mb) {
    const double share = std::log2(mb / options_.min_mb) / std::log2(options_.max_mb / options_.min_mb);
    const auto level = static_cast<std::size_t>(std::clamp(share, 0.0, 0.999) * 8);
    return levels_.at(level) * (1 + 0.1 * random_.uniform()) * (random_.below(20) == 0 ? 10 : 1);
  }

 private:
  Random random_;
  std::array<double, 8> levels_{};
  BayesianTunerOptions options_;
};

#ifdef TORCHEXT_SANITIZED
constexpr std::uint64_t kWildRuns = 20;
#else
constexpr std::uint64_t kWildRuns = 150;
#endif

// It ends at a limit that was tried, and is the best as far as steps that vary by a tenth let one tell.
TEST(BayesianTuner, StaysInTheRangeAndEndsAtTheBestSeen) {
  for (std::uint64_t seed = 0; seed < kWildRuns; ++seed) {
    Wild wild(seed);
    const BayesianTunerOptions& options = wild.options();
    BayesianTuner tuner(options);
    std::map<double, std::vector<double>> seen;
    int steps = 0;
    while (!tuner.done()) {
      ASSERT_GE(tuner.propose(), options.min_mb);
      ASSERT_LE(tuner.propose(), options.max_mb);
      const double proposed = tuner.propose();
      ++steps;
      if (tuner.report(wild.step(proposed))) {
        ASSERT_EQ(steps % (options.window_steps + 1), 0);
        ASSERT_EQ(tuner.state().trials.back().bucket_mb, proposed);
        seen[proposed].push_back(std::log(tuner.state().trials.back().step_seconds));
      } else {
        ASSERT_EQ(tuner.propose(), proposed);
      }
    }
    ASSERT_LE(tuner.state().trials.size(), static_cast<std::size_t>(options.max_trials));
    const auto mean = [](const std::vector<double>& values) {
      double sum = 0;
      for (const double value : values) {
        sum += value;
      }
      return sum / static_cast<double>(values.size());
    };
    ASSERT_TRUE(seen.contains(tuner.propose()));
    for (const auto& [mb, values] : seen) {
      ASSERT_LE(mean(seen.at(tuner.propose())), mean(values) + 0.1) << "seed " << seed << ", " << mb << " MB";
    }
  }
}

TEST(BayesianTuner, GoesOnFromItsStateAlike) {
  for (std::uint64_t seed = 0; seed < kWildRuns / 10; ++seed) {
    Wild wild(seed);
    Wild same(seed);
    BayesianTuner tuner(wild.options());
    BayesianTuner restored(same.options());
    while (!tuner.done()) {
      const bool over = tuner.report(wild.step(tuner.propose()));
      restored.report(same.step(restored.propose()));
      if (over) {
        restored = BayesianTuner(same.options(), BayesianTunerState(restored.state()));
      }
      ASSERT_EQ(tuner.propose(), restored.propose());
      ASSERT_EQ(tuner.done(), restored.done());
      ASSERT_EQ(tuner.state(), restored.state());
      ASSERT_EQ(tuner.best(), restored.best());
    }
  }
}

TEST(ExpectedRelativeImprovement, IsTheIntegral) {
  for (const double mean : {-0.3, -0.02, 0.0, 0.1, 1.0}) {
    for (const double deviation : {0.01, 0.1, 0.7}) {
      double sum = 0;
      for (int i = 0; i < 10000; ++i) {  // midpoints over 10 standard deviations to either side
        const double z = (i + 0.5) / 500 - 10;
        const double density = std::exp(-z * z / 2) / std::sqrt(2 * std::numbers::pi);
        sum += std::max(0.0, 1 - std::exp(mean + z * deviation - 0.2)) * density / 500;
      }
      EXPECT_NEAR(expectedRelativeImprovement(mean, deviation * deviation, 0.2), sum, 1e-5);
    }
  }
  EXPECT_NEAR(expectedRelativeImprovement(std::log(0.9), 0, 0), 0.1, 1e-12);
  EXPECT_EQ(expectedRelativeImprovement(1, 0, 0), 0);
}

TEST(BayesianTuner, BadInputNamesValueAndRange) {
  const auto with = [](auto change) {
    BayesianTunerOptions options;
    change(options);
    return BayesianTuner(options);
  };
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THROW_MESSAGE(with([](auto& o) { o.min_mb = 0; }), std::invalid_argument,
                       "min_mb = 0: allowed finite, above 0");
  EXPECT_THROW_MESSAGE(with([](auto& o) { o.max_mb = 0.5; }), std::invalid_argument, "max_mb = 0.5: allowed finite, 1");
  EXPECT_THROW_MESSAGE(with([](auto& o) { o.max_mb = kNan; }), std::invalid_argument, "max_mb = nan");
  EXPECT_THROW_MESSAGE(with([](auto& o) { o.start_mb = -1; }), std::invalid_argument, "start_mb = -1");
  EXPECT_THROW_MESSAGE(with([](auto& o) { o.max_trials = 0; }), std::invalid_argument, "max_trials = 0: allowed 1");
  EXPECT_THROW_MESSAGE(with([](auto& o) { o.window_steps = 0; }), std::invalid_argument, "window_steps = 0: allowed 1");
  EXPECT_THROW_MESSAGE(with([](auto& o) { o.stop_improvement = 2; }), std::invalid_argument,
                       "stop_improvement = 2: allowed 0..1");

  const BayesianTunerOptions options;
  EXPECT_THROW_MESSAGE(BayesianTuner(options, {{{512, 1, 0}}}), std::invalid_argument,
                       "bucket_mb of a trial = 512: allowed 1..256");
  EXPECT_THROW_MESSAGE(BayesianTuner(options, {{{2, 0, 0}}}), std::invalid_argument, "step_seconds of a trial = 0");
  EXPECT_THROW_MESSAGE(BayesianTuner(options, {{{2, 1, -1}}}), std::invalid_argument, "noise_variance of a trial = -1");

  BayesianTuner tuner(options);
  for (const double seconds : {0.0, -1.0, kNan, std::numeric_limits<double>::infinity()}) {
    EXPECT_THROW_MESSAGE(tuner.report(seconds), std::invalid_argument, "step_seconds = ");
  }
  reportWindow(tuner, options, 1);  // bad ones were not counted
}

}  // namespace
}  // namespace torchext::core
