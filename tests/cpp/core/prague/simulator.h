// A discrete-event model of training with a group generator: workers compute, ask, wait until all members of their
// group have arrived, average, go on; or, overlapped (the order cta), compute while they wait and average, and ask
// again when both are done. Time is in iterations of a normal worker.
#pragma once

#include <cstdint>
#include <vector>

#include "core/prague/group_generator.h"

namespace torchext::core::testing {

struct SimulationOptions {
  GeneratorOptions generator = {};
  std::vector<double> slowdown = {};  // factor on a worker's compute time; empty: 1 for all
  double jitter = 0.1;                // compute time is uniform in 1 +- jitter, times the slowdown
  double reduce_time = 0.15;          // of a partial all-reduce; a group of one costs nothing
  bool overlapped = false;
  double ends_apart = 0.0;  // members of a group end one after the other, within this time
  double duration = 1000.0;
  std::uint64_t seed = 1;
};

struct SimulationResult {
  std::vector<std::int64_t> iterations;  // finished by each worker
  std::vector<std::int64_t> lone;        // of these, averaged with nobody
  std::vector<double> waited_for;        // time that others spent in groups whose last member it was
  double gradients_per_time = 0;
  // meetings[a * n + b]: groups that a and b shared.
  std::vector<std::int64_t> meetings;
};

SimulationResult simulate(const SimulationOptions& options);

// The same workers with an all-reduce over everybody after each iteration.
double allReduceGradientsPerTime(const SimulationOptions& options, double all_reduce_time);

}  // namespace torchext::core::testing
