// step_samples says how long the slowest rank of a group takes, from the measured steps of all ranks.
//
// Exact ways wait for the slowest of n ranks, groups for that of g. Samples of all ranks are pooled; those of a rank
// whose median is off by more than 10 % from the pool's are kept apart, for they are no noise. Seconds.
#pragma once

#include <vector>

namespace torchext::core {

inline constexpr double kApart = 0.1;  // of the median of all samples

// E[max of g] of independent draws from the samples x_1 <= ... <= x_m: sum x_i ((i/m)^g - ((i-1)/m)^g).
double expectedMaximum(std::vector<double> samples, int draws);

class StepSamples {
 public:
  // samples[rank]: of its steps without communication, finite and above 0, one a rank at least.
  explicit StepSamples(const std::vector<std::vector<double>>& samples);

  // Ranks that are slower or faster than the others, ascending.
  const std::vector<int>& apartRanks() const { return apart_ranks_; }
  // E[max] over a group of `group` out of `ranks`, drawn without replacement. Ranks that were measured apart are among
  // them once each; all others are like the pool. A world smaller than that of the samples keeps the slowest ones.
  double slowest(int group, int ranks) const;
  double typical() const { return slowest(1, 1 + static_cast<int>(apart_.size())); }

 private:
  std::vector<double> pool_;                // ascending
  std::vector<std::vector<double>> apart_;  // ascending each
  std::vector<int> apart_ranks_;
};

}  // namespace torchext::core
