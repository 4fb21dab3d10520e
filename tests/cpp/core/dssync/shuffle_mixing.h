// What the tests of the shuffle schedules share: options, and how values mix.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "core/base/check.h"
#include "core/base/random.h"
#include "core/dssync/shuffle_schedule.h"

namespace torchext::core::testing {

using Members = std::vector<int>;

inline std::vector<int> blocks(int count, int size) {
  std::vector<int> result;
  result.reserve(index(count * size));
  for (int i = 0; i < count * size; ++i) {
    result.push_back(i / size);
  }
  return result;
}

inline ShuffleOptions gridOptions(int world_size, int group_size) {
  return {.world_size = world_size, .group_size = group_size, .kind = ShuffleKind::kGrid};
}

inline ShuffleOptions randomOptions(int world_size, int group_size, std::uint64_t seed) {
  return {.world_size = world_size, .group_size = group_size, .kind = ShuffleKind::kRandom, .seed = seed};
}

// Four racks of two hosts of two ranks each.
inline ShuffleOptions fourRacks() {
  return {.world_size = 16,
          .group_size = 4,
          .kind = ShuffleKind::kTopology,
          .host_of = blocks(8, 2),
          .rack_of = blocks(4, 2)};
}

template <typename Real>
std::vector<Real> averaged(const ShuffleSchedule& schedule, std::int64_t step, const std::vector<Real>& values) {
  std::vector<Real> result(values.size());
  for (const auto& group : schedule.groupsAt(step)) {
    Real sum = 0;
    for (const int member : group) {
      sum += values[index(member)];
    }
    for (const int member : group) {
      result[index(member)] = sum / static_cast<Real>(group.size());
    }
  }
  return result;
}

inline double variance(const std::vector<double>& values) {
  const double mean = std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
  double sum = 0;
  for (const double value : values) {
    sum += (value - mean) * (value - mean);
  }
  return sum / static_cast<double>(values.size());
}

template <typename Real>
std::vector<Real> randomValues(int count, std::uint64_t seed) {
  Random random(seed);
  std::vector<Real> values;
  for (int i = 0; i < count; ++i) {
    // Twelve uniforms: near enough to a normal deviate, on every platform.
    double sum = -6.0;
    for (int k = 0; k < 12; ++k) {
      sum += random.uniform();
    }
    values.push_back(static_cast<Real>(sum));
  }
  return values;
}

// The share of the variance that steps [0, steps) leave: of the worst start, by power iteration on P^T P.
inline double worstContraction(const ShuffleSchedule& schedule, std::int64_t steps) {
  auto values = randomValues<double>(schedule.options().world_size, 5);
  double left = 0;
  for (int iteration = 0; iteration < 40; ++iteration) {
    const double mean = std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
    for (double& value : values) {
      value -= mean;
    }
    const double before = std::sqrt(variance(values));
    if (before < 1e-12) {
      return 0;
    }
    for (double& value : values) {
      value /= before;
    }
    for (std::int64_t step = 0; step < steps; ++step) {
      values = averaged(schedule, step, values);
    }
    // Every round is a symmetric projection: the transpose is the rounds in reverse.
    for (std::int64_t step = steps - 1; step >= 0; --step) {
      values = averaged(schedule, step, values);
    }
    left = std::sqrt(variance(values));
  }
  return left;
}

}  // namespace torchext::core::testing
