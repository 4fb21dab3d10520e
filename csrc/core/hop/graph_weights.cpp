#include "core/hop/graph_weights.h"

#include <algorithm>
#include <cmath>

#include "core/base/check.h"

namespace torchext::core {
namespace {

using Neighbours = std::vector<std::vector<int>>;
using Weights = std::vector<std::vector<double>>;

void checkSum(const char* what, std::size_t rank, double sum) {
  if (std::abs(sum - 1.0) > kWeightTolerance) {
    throwInvalid(
        "sum of weights", sum,
        concat("1 +- ", kWeightTolerance, " for what ", what, " rank ", rank, " (W must be doubly stochastic)"));
  }
}

Weights metropolisWeights(const Neighbours& in) {
  Weights result(in.size());
  for (std::size_t rank = 0; rank < in.size(); ++rank) {
    auto& weights = result[rank];
    std::size_t own = 0;
    double others = 0.0;
    for (const int from : in[rank]) {
      if (index(from) == rank) {
        own = weights.size();
        weights.push_back(0.0);
        continue;
      }
      weights.push_back(1.0 / static_cast<double>(std::max(in[rank].size(), in[index(from)].size())));
      others += weights.back();
    }
    weights[own] = 1.0 - others;
  }
  return result;
}

Weights scaledWeights(const Neighbours& in, const Neighbours& out) {
  // A strongly connected graph with self loops has exactly one such scaling (its matrix is fully indecomposable).
  constexpr int kMostRounds = 20000;
  constexpr double kConverged = 1e-12;
  std::vector<double> give(in.size(), 1.0);
  std::vector<double> take(in.size(), 1.0);
  double worst = 1.0;
  for (int round = 0; round < kMostRounds && worst > kConverged; ++round) {
    worst = 0.0;
    for (std::size_t from = 0; from < out.size(); ++from) {
      double sum = 0.0;
      for (const int to : out[from]) {
        sum += take[index(to)];
      }
      worst = std::max(worst, std::abs(give[from] * sum - 1.0));
      give[from] = 1.0 / sum;
    }
    // Last, so that what a rank averages sums to 1 to the last bit or two.
    for (std::size_t to = 0; to < in.size(); ++to) {
      double sum = 0.0;
      for (const int from : in[to]) {
        sum += give[index(from)];
      }
      take[to] = 1.0 / sum;
    }
  }
  if (worst > kConverged) {
    throwInvalid("rest of the scaling of weights", worst,
                 concat("at most ", kConverged, " after ", kMostRounds, " rounds: pass weights of your own"));
  }
  Weights result(in.size());
  for (std::size_t to = 0; to < in.size(); ++to) {
    for (const int from : in[to]) {
      result[to].push_back(give[index(from)] * take[to]);
    }
  }
  return result;
}

}  // namespace

Weights uniformWeights(const Neighbours& in) {
  Weights result;
  for (const auto& from : in) {
    result.emplace_back(from.size(), 1.0 / static_cast<double>(from.size()));
  }
  return result;
}

Weights doublyStochasticWeights(const Neighbours& in, const Neighbours& out) {
  if (in == out) {
    return metropolisWeights(in);
  }
  const auto regular = [degree = in.front().size()](const auto& ranks) { return ranks.size() == degree; };
  const bool all_equal = std::all_of(in.begin(), in.end(), regular) && std::all_of(out.begin(), out.end(), regular);
  return all_equal ? uniformWeights(in) : scaledWeights(in, out);
}

void checkDoublyStochastic(const std::vector<std::vector<double>>& weights) {
  std::vector<double> taken(weights.size(), 0.0);
  for (std::size_t from = 0; from < weights.size(); ++from) {
    const auto& row = weights[from];
    if (row.size() != weights.size()) {
      throwInvalid("size of a row of weights", row.size(), concat(weights.size(), " (square); it is row ", from));
    }
    double given = 0.0;
    for (std::size_t to = 0; to < row.size(); ++to) {
      if (!std::isfinite(row[to]) || row[to] < 0 || (from == to && row[to] == 0)) {
        throwInvalid("weight", row[to],
                     concat(from == to ? "more than 0" : "0 or more", ", finite; it is that of rank ", from,
                            "'s model at rank ", to));
      }
      given += row[to];
      taken[to] += row[to];
    }
    checkSum("is taken of", from, given);
  }
  for (std::size_t to = 0; to < taken.size(); ++to) {
    checkSum("is averaged at", to, taken[to]);
  }
}

}  // namespace torchext::core
