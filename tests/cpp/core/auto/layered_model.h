// A model of layers on a line of a network: what the tests of core/auto are tried on.
#pragma once

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <vector>

#include "core/auto/candidate_simulator.h"
#include "core/base/check.h"
#include "core/base/random.h"

namespace torchext::core::testing {

// One gradient a layer, finished at the end of the layer's backward; the last layer's is the first.
inline StepProfile layeredModel(const std::vector<std::size_t>& layer_bytes, double forward_seconds,
                                double backward_seconds) {
  StepProfile profile;
  const auto layers = static_cast<int>(layer_bytes.size());
  profile.forward_seconds.assign(layer_bytes.size(), forward_seconds);
  for (int layer = layers - 1; layer >= 0; --layer) {
    const double ready = (layers - layer) * backward_seconds;
    profile.gradients.push_back({layer_bytes[index(layer)], ready, layer, 0, -1});
  }
  profile.backward_seconds = profile.gradients.back().ready_seconds;
  return profile;
}

// Halves of alpha + beta bytes by a ring, and an all-reduce of twice that.
inline LinkModel straightLink(double alpha, double beta, int ranks = 4) {
  const CostTable half = CostTable::line(alpha, beta);
  return {Network{ranks, {1e-4, 1e8}},
          CostTable::line(2 * alpha, 2 * beta),
          {{Algorithm::kRing, half, half}},
          CostTable::line(alpha, beta)};
}

inline Candidate withEnds(const StepProfile& profile, const char* way, const char* form, const std::vector<int>& ends) {
  Candidate candidate;
  candidate.way = way;
  candidate.form = form;
  candidate.algorithm = "ring";
  candidate.buckets = bucketsOfEnds(gradientsByKind(profile.gradients), {ends});
  return candidate;
}

inline std::vector<int> endsOf(const Candidate& candidate) {
  std::vector<int> ends;
  for (const auto& bucket : candidate.buckets) {
    ends.push_back(bucket.back() + 1);
  }
  return ends;
}

// Each gradient by itself.
inline std::vector<int> singly(int gradients) {
  std::vector<int> ends(index(gradients));
  std::iota(ends.begin(), ends.end(), 1);
  return ends;
}

// Points at random sizes and times, which the table makes monotone.
inline CostTable randomTable(Random& random, std::size_t most_bytes) {
  std::vector<CostPoint> points;
  std::size_t bytes = random.below(3);
  while (bytes < most_bytes) {
    points.push_back({bytes, random.uniform() * static_cast<double>(1 + bytes)});
    bytes += 1 + random.below(static_cast<std::uint32_t>(most_bytes / 4));
  }
  return CostTable(points);
}

}  // namespace torchext::core::testing
