// How well the tuner tunes: models on networks, their step times from the alpha-beta cost model with measurement noise,
// against the best of a grid, random search and the exact optimum. The truth is the model's time without noise.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <string>
#include <vector>

#include "core/auto/bucket_program.h"
#include "core/base/check.h"
#include "core/base/random.h"
#include "core/dear/bayesian_tuner.h"
#include "fusion_settings.h"

namespace torchext::core::testing {
namespace {

constexpr int kGridPoints = 12;
#ifdef TORCHEXT_SANITIZED
constexpr int kSeeds = 3;
#else
constexpr int kSeeds = 40;
#endif

double normal(Random& random) {
  return std::sqrt(-2 * std::log(1 - random.uniform())) * std::cos(2 * std::numbers::pi * random.uniform());
}

// Now and then a step takes much longer: a checkpoint, a page fault, another job.
double measuredStep(double seconds, double noise, Random& random) {
  const double hiccup = random.below(50) == 0 ? 1.5 : 1;
  return seconds * hiccup * std::max(0.5, 1 + noise * normal(random));
}

struct Grid {
  double best;
  double worst;
};
Grid gridOf(const FusionSetting& setting) {
  const auto options = BayesianTunerOptions::forModel(setting.profile.gradientBytes());
  std::vector<double> seconds;
  for (int i = 0; i < kGridPoints; ++i) {
    const double share = static_cast<double>(i) / (kGridPoints - 1);
    seconds.push_back(setting.seconds(options.min_mb * std::pow(options.max_mb / options.min_mb, share)));
  }
  const auto [best, worst] = std::minmax_element(seconds.begin(), seconds.end());
  return {*best, *worst};
}

struct Outcome {
  double seconds;  // without noise, at the limit that was found
  int trials;
};

Outcome tune(const FusionSetting& setting, const BayesianTunerOptions& options, double noise, std::uint64_t seed) {
  Random random(seed);
  BayesianTuner tuner(options);
  double seconds = setting.seconds(tuner.propose());
  while (!tuner.done()) {
    if (tuner.report(measuredStep(seconds, noise, random))) {
      seconds = setting.seconds(tuner.propose());
    }
  }
  return {seconds, static_cast<int>(tuner.state().trials.size())};
}

// As many trials, measured in the same way, uniform over the same range; the one of least median is kept.
double randomSearch(const FusionSetting& setting, const BayesianTunerOptions& options, double noise, int trials,
                    std::uint64_t seed) {
  Random random(seed);
  double least = 0;
  double found = 0;
  for (int trial = 0; trial < trials; ++trial) {
    const double truth = setting.seconds(options.min_mb * std::pow(options.max_mb / options.min_mb, random.uniform()));
    std::vector<double> steps(index(options.window_steps));
    std::generate(steps.begin(), steps.end(), [&] { return measuredStep(truth, noise, random); });
    std::sort(steps.begin(), steps.end());
    const double median = (steps[(steps.size() - 1) / 2] + steps[steps.size() / 2]) / 2;
    if (trial == 0 || median < least) {
      least = median;
      found = truth;
    }
  }
  return found;
}

// Over all seeds and noises of 1, 2 and 3 %.
struct Summary {
  double mean = 0;   // over the grid's best
  double worst = 0;  // of all runs
  int missed = 0;    // runs that are more than 3 % over the grid's best
  int allowed = 0;   // 1 % of the runs: noise of 3 % can hide a difference of 3 % for three windows on end
  double trials = 0;
  int most_trials = 0;
  double random = 0;  // random search with as many trials: mean over the grid's best
};

Summary summarize(const FusionSetting& setting, const BayesianTunerOptions& options) {
  Summary summary;
  const double best = gridOf(setting).best;
  int runs = 0;
  for (const double noise : {0.01, 0.02, 0.03}) {
    for (int seed = 0; seed < kSeeds; ++seed) {
      const Outcome outcome = tune(setting, options, noise, 2 * static_cast<std::uint64_t>(runs));
      summary.mean += outcome.seconds / best;
      summary.worst = std::max(summary.worst, outcome.seconds / best);
      summary.missed += outcome.seconds > 1.03 * best ? 1 : 0;
      summary.trials += outcome.trials;
      summary.most_trials = std::max(summary.most_trials, outcome.trials);
      summary.random +=
          randomSearch(setting, options, noise, outcome.trials, 2 * static_cast<std::uint64_t>(runs) + 1) / best;
      ++runs;
    }
  }
  for (double* sum : {&summary.mean, &summary.trials, &summary.random}) {
    *sum /= runs;
  }
  summary.allowed = runs / 100;
  return summary;
}

// Figures for --gtest_output=xml.
void record(const std::string& name, const Grid& grid, const Summary& summary) {
  ::testing::Test::RecordProperty(
      name, concat("grid best ", grid.best, " s, worst ", grid.worst / grid.best, "; tuner mean ", summary.mean,
                   ", worst ", summary.worst, ", missed ", summary.missed, ", trials mean ", summary.trials, ", most ",
                   summary.most_trials, "; random search mean ", summary.random));
}

TEST(BayesianTunerOracle, TheSettingsAreWorthTuning) {
  for (const FusionSetting& setting : fusionSettings()) {
    const Grid grid = gridOf(setting);
    EXPECT_GT(grid.worst, 1.1 * grid.best) << setting.name;
  }
}

TEST(BayesianTunerOracle, WithinThreePercentOfTheGridAndBetterThanRandomSearch) {
  double tuner = 0;
  double random = 0;
  for (const FusionSetting& setting : fusionSettings()) {
    const Summary summary = summarize(setting, BayesianTunerOptions::forModel(setting.profile.gradientBytes()));
    record(setting.name, gridOf(setting), summary);
    EXPECT_LE(summary.missed, summary.allowed) << setting.name;
    EXPECT_LE(summary.mean, 1.02) << setting.name;
    EXPECT_LE(summary.most_trials, 12) << setting.name;
    tuner += summary.mean;
    random += summary.random;
  }
  EXPECT_LT(tuner, random);
}

// The same with all trials spent: the gain is not only that the search knows when to stop.
TEST(BayesianTunerOracle, BetterThanRandomSearchWithAllTrials) {
  double tuner = 0;
  double random = 0;
  for (const FusionSetting& setting : fusionSettings()) {
    BayesianTunerOptions options = BayesianTunerOptions::forModel(setting.profile.gradientBytes());
    options.stop_improvement = 0;
    const Summary summary = summarize(setting, options);
    record(setting.name, gridOf(setting), summary);
    EXPECT_EQ(summary.trials, 12) << setting.name;
    EXPECT_LE(summary.missed, summary.allowed) << setting.name;
    EXPECT_LE(summary.mean, 1.02) << setting.name;
    tuner += summary.mean;
    random += summary.random;
  }
  EXPECT_LT(tuner, random);
}

// Steps that differ by a tenth, as on a machine with other work: one run in ten may end further off, the mean does not.
TEST(BayesianTunerOracle, NoisyStepsAreMeasuredMoreOften) {
  double sum = 0;
  int missed = 0;
  int runs = 0;
  for (const FusionSetting& setting : fusionSettings()) {
    const auto options = BayesianTunerOptions::forModel(setting.profile.gradientBytes());
    for (int seed = 0; seed < kSeeds; ++seed) {
      const Outcome outcome = tune(setting, options, 0.1, static_cast<std::uint64_t>(++runs));
      sum += outcome.seconds / gridOf(setting).best;
      missed += outcome.seconds > 1.03 * gridOf(setting).best ? 1 : 0;
      EXPECT_LE(outcome.trials, 12);
    }
  }
  EXPECT_LE(sum / runs, 1.01);
  EXPECT_LE(missed, runs / 10);
}

// From the exact optimum of the reduce-scatter half, the other way to start.
TEST(BayesianTunerOracle, StartsFromTheExactOptimum) {
  for (const FusionSetting& setting : fusionSettings()) {
    BayesianTunerOptions options = BayesianTunerOptions::forModel(setting.profile.gradientBytes());
    const auto& gradients = setting.profile.gradients;
    const BucketCost reduce = [&](std::size_t bytes) {
      return setting.link.transport("ring").reduce_scatter.seconds(bytes);
    };
    const EndsByKind optimum = optimalEnds(gradients, gradientsByKind(gradients), reduce);
    options.start_mb =
        static_cast<double>(setting.profile.gradientBytes()) / static_cast<double>(optimum.front().size()) / kMb;
    const Summary summary = summarize(setting, options);
    record(setting.name, gridOf(setting), summary);
    EXPECT_LE(summary.missed, summary.allowed) << setting.name;
    EXPECT_LE(summary.mean, 1.02) << setting.name;
    EXPECT_LE(summary.most_trials, 12) << setting.name;
  }
}

}  // namespace
}  // namespace torchext::core::testing
