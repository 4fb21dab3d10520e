#include "core/auto/consensus.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>

#include "core/base/check.h"
#include "core/base/random.h"

namespace torchext::core {
namespace {

using Vector = std::vector<double>;

constexpr double kSumTolerance = 1e-6;  // rows that were written as float

double dot(const Vector& a, const Vector& b) { return std::inner_product(a.begin(), a.end(), b.begin(), 0.0); }

void subtract(Vector& from, double factor, const Vector& what) {
  for (std::size_t i = 0; i < from.size(); ++i) {
    from[i] -= factor * what[i];
  }
}

// Returns the length that it had.
double normalize(Vector& vector) {
  const double length = std::sqrt(dot(vector, vector));
  for (double& value : vector) {
    value /= length > 0 ? length : 1;
  }
  return length;
}

// x -> W^T W x, by the edges alone.
class SquaredMixing {
 public:
  explicit SquaredMixing(const std::vector<Vector>& weights) : ranks_(weights.size()) {
    for (std::size_t from = 0; from < ranks_; ++from) {
      for (std::size_t to = 0; to < ranks_; ++to) {
        if (weights[from][to] != 0) {
          edges_.push_back({from, to, weights[from][to]});
        }
      }
    }
  }
  Vector operator()(const Vector& x) const {
    Vector mixed(ranks_, 0.0);
    for (const auto& [from, to, weight] : edges_) {
      mixed[to] += weight * x[from];
    }
    Vector result(ranks_, 0.0);
    for (const auto& [from, to, weight] : edges_) {
      result[from] += weight * mixed[to];
    }
    return result;
  }

 private:
  struct Edge {
    std::size_t from;
    std::size_t to;
    double weight;
  };
  std::size_t ranks_;
  std::vector<Edge> edges_;
};

// A symmetric tridiagonal matrix, whose values are those of a positive semidefinite one and at most 1.
struct Tridiagonal {
  Vector diagonal;
  Vector beside;  // beside[i]: between i and i + 1

  // Sylvester: the largest eigenvalue is below x if and only if all pivots of T - x are negative.
  bool allBelow(double x) const {
    double pivot = -1;
    for (std::size_t i = 0; i < diagonal.size(); ++i) {
      pivot = diagonal[i] - x - (i == 0 ? 0 : beside[i - 1] * beside[i - 1] / pivot);
      if (pivot >= 0) {
        return false;
      }
    }
    return true;
  }
  double largest() const {
    double low = 0;
    double high = 1 + kSumTolerance;
    for (int halvings = 0; halvings < 60; ++halvings) {
      const double middle = (low + high) / 2;
      (allBelow(middle) ? high : low) = middle;
    }
    return low;
  }
};

void checkMixing(const std::vector<Vector>& weights) {
  if (weights.empty()) {
    throwInvalid("number of rows of weights", 0, "1 or more");
  }
  Vector taken(weights.size(), 0.0);
  for (std::size_t from = 0; from < weights.size(); ++from) {
    if (weights[from].size() != weights.size()) {
      throwInvalid("size of a row of weights", weights[from].size(), concat(weights.size(), ", it is row ", from));
    }
    for (std::size_t to = 0; to < weights.size(); ++to) {
      taken[to] += weights[from][to];
    }
    const double given = std::accumulate(weights[from].begin(), weights[from].end(), 0.0);
    if (!(std::abs(given - 1) <= kSumTolerance)) {
      throwInvalid("sum of a row of weights", given, concat("1, it is row ", from));
    }
  }
  for (std::size_t to = 0; to < taken.size(); ++to) {
    if (!(std::abs(taken[to] - 1) <= kSumTolerance)) {
      throwInvalid("sum of a column of weights", taken[to], concat("1, it is column ", to));
    }
  }
}

}  // namespace

double groupRho(int ranks, int group) {
  if (ranks < 1) {
    throwInvalid("ranks", ranks, "1 or more");
  }
  if (group < 1 || group > ranks) {
    throwInvalid("group", group, concat("1..", ranks));
  }
  return ranks == 1 ? 0 : static_cast<double>(ranks - group) / (static_cast<double>(group) * (ranks - 1));
}

double mixingRho(const std::vector<std::vector<double>>& weights) {
  checkMixing(weights);
  constexpr double kConverged = 1e-13;
  constexpr int kQuietSteps = 12;  // that bring nothing new
  const std::size_t ranks = weights.size();
  const SquaredMixing squared(weights);
  // The mean is what all mixings keep: the search is orthogonal to it, and to all directions that it had.
  std::vector<Vector> directions{Vector(ranks, 1 / std::sqrt(static_cast<double>(ranks)))};
  Vector next(ranks);
  Random random(1);
  std::generate(next.begin(), next.end(), [&] { return random.uniform(); });
  Tridiagonal projected;
  double rho = 0;
  for (int quiet = 0; quiet < kQuietSteps && directions.size() < ranks;) {
    for (int twice = 0; twice < 2; ++twice) {
      for (const Vector& direction : directions) {
        subtract(next, dot(next, direction), direction);
      }
    }
    const double length = normalize(next);
    if (length < kConverged) {
      break;  // nothing is left that was not searched
    }
    if (!projected.diagonal.empty()) {
      projected.beside.push_back(length);
    }
    directions.push_back(next);
    next = squared(directions.back());
    projected.diagonal.push_back(dot(next, directions.back()));
    const double better = projected.largest();
    quiet = better > rho * (1 + kConverged) ? 0 : quiet + 1;
    rho = better;
  }
  return rho;
}

}  // namespace torchext::core
