// step_samples says how long the slowest rank of a group takes, from the measured steps of all ranks.
//
// Exact ways wait for the slowest of n ranks, groups for that of g. Samples of all ranks are pooled. Those of a rank
// whose median is off by more than 10 % from that of all are kept apart, for they are no noise. Seconds.
#pragma once

#include <cstddef>
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
  // E[max] over a random group of so many of so many ranks. Each rank apart is one of them, the slowest first where the
  // world is smaller than that of the samples; all others are like the pool.
  double slowest(int group, int ranks) const;

 private:
  double shareOfGroups(double x, int group, int ranks, std::size_t apart) const;

  std::vector<double> pool_;                // ascending
  std::vector<std::vector<double>> apart_;  // ascending each, slowest first
  std::vector<int> apart_ranks_;
};

}  // namespace torchext::core
