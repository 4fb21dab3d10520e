#include "core/dear/gaussian_process.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <map>
#include <numbers>
#include <numeric>
#include <utility>

#include "core/base/check.h"

namespace torchext::core {
namespace {

constexpr int kGrid = 5;
constexpr double kPrecision = 0.01;  // of a hyperparameter, relative
constexpr double kLeastJitter = 1e-14;

void checkPoints(const std::vector<double>& x, const std::vector<double>& y) {
  if (x.empty()) {
    throwInvalid("number of points", 0, "1 or more");
  }
  if (x.size() != y.size()) {
    throwInvalid("size of y", y.size(), concat(x.size(), ", that of x"));
  }
  for (const auto* values : {&x, &y}) {
    for (const double value : *values) {
      if (!std::isfinite(value)) {
        throwInvalid(values == &x ? "x" : "y", value, "finite");
      }
    }
  }
}

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

}  // namespace

double matern52(double distance, double length_scale) {
  const double r = std::sqrt(5.0) * std::abs(distance) / length_scale;
  return (1 + r + r * r / 3) * std::exp(-r);
}

GaussianProcess::GaussianProcess(std::vector<double> x, const std::vector<double>& y,
                                 const Hyperparameters& hyperparameters)
    : GaussianProcess(std::move(x), y, hyperparameters, false) {}

GaussianProcess::GaussianProcess(std::vector<double> x, const std::vector<double>& y,
                                 const Hyperparameters& hyperparameters, bool fit_mean)
    : hyperparameters_(hyperparameters), x_(std::move(x)) {
  checkPoints(x_, y);
  checkPositive("length_scale", hyperparameters_.length_scale);
  checkPositive("signal_variance", hyperparameters_.signal_variance);
  if (!std::isfinite(hyperparameters_.noise_variance) || hyperparameters_.noise_variance < 0) {
    throwInvalid("noise_variance", hyperparameters_.noise_variance, "finite, 0 or more");
  }
  if (!std::isfinite(hyperparameters_.mean)) {
    throwInvalid("mean", hyperparameters_.mean, "finite");
  }
  factorize();
  if (fit_mean) {
    const std::vector<double> ones = solve(std::vector<double>(x_.size(), 1.0));
    hyperparameters_.mean = dot(ones, y) / std::accumulate(ones.begin(), ones.end(), 0.0);
  }
  std::vector<double> residuals(y);
  for (double& residual : residuals) {
    residual -= hyperparameters_.mean;
  }
  weights_ = solve(residuals);
  double log_determinant = 0;
  for (std::size_t i = 0; i < x_.size(); ++i) {
    log_determinant += 2 * std::log(cholesky_[i * x_.size() + i]);
  }
  log_marginal_likelihood_ = -0.5 * (dot(residuals, weights_) + log_determinant +
                                     static_cast<double>(x_.size()) * std::log(2 * std::numbers::pi));
}

void GaussianProcess::factorize() {
  const std::size_t n = x_.size();
  const auto attempt = [&](double jitter) {
    for (std::size_t i = 0; i < n; ++i) {
      for (std::size_t j = 0; j <= i; ++j) {
        double value = hyperparameters_.signal_variance * matern52(x_[i] - x_[j], hyperparameters_.length_scale);
        if (i == j) {
          value += hyperparameters_.noise_variance + jitter;
        }
        for (std::size_t k = 0; k < j; ++k) {
          value -= cholesky_[i * n + k] * cholesky_[j * n + k];
        }
        if (i != j) {
          cholesky_[i * n + j] = value / cholesky_[j * n + j];
        } else if (value > 0) {
          cholesky_[i * n + i] = std::sqrt(value);
        } else {
          return false;
        }
      }
    }
    return true;
  };
  cholesky_.assign(n * n, 0.0);
  double jitter = 0;
  while (!attempt(jitter)) {
    // Ends: a diagonal that outweighs its row is positive definite.
    jitter = jitter == 0 ? kLeastJitter * hyperparameters_.signal_variance : 10 * jitter;
  }
}

std::vector<double> GaussianProcess::solveLower(std::vector<double> right) const {
  const std::size_t n = x_.size();
  for (std::size_t i = 0; i < n; ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      right[i] -= cholesky_[i * n + j] * right[j];
    }
    right[i] /= cholesky_[i * n + i];
  }
  return right;
}

std::vector<double> GaussianProcess::solve(std::vector<double> right) const {
  const std::size_t n = x_.size();
  right = solveLower(std::move(right));
  for (std::size_t i = n; i-- > 0;) {
    for (std::size_t j = i + 1; j < n; ++j) {
      right[i] -= cholesky_[j * n + i] * right[j];
    }
    right[i] /= cholesky_[i * n + i];
  }
  return right;
}

Posterior GaussianProcess::at(double x) const {
  if (!std::isfinite(x)) {
    throwInvalid("x", x, "finite");
  }
  std::vector<double> covariance(x_.size());
  std::transform(x_.begin(), x_.end(), covariance.begin(), [&](double seen) {
    return hyperparameters_.signal_variance * matern52(x - seen, hyperparameters_.length_scale);
  });
  const double mean = hyperparameters_.mean + dot(covariance, weights_);
  const std::vector<double> explained = solveLower(std::move(covariance));
  // Rounding may take it a little below 0 at a point that is known exactly.
  return Posterior{mean, std::max(0.0, hyperparameters_.signal_variance - dot(explained, explained))};
}

// Length scale, signal variance and noise variance as logarithms, inside a box.
class HyperparameterSearch {
 public:
  HyperparameterSearch(const std::vector<double>& x, const std::vector<double>& y, const HyperparameterRanges& ranges)
      : x_(x), y_(y) {
    const std::array<std::pair<const char*, SearchRange>, 3> named{{{"length_scale", ranges.length_scale},
                                                                    {"signal_variance", ranges.signal_variance},
                                                                    {"noise_variance", ranges.noise_variance}}};
    for (std::size_t axis = 0; axis < named.size(); ++axis) {
      const auto& [name, range] = named[axis];
      checkPositive(name, range.low);
      if (!std::isfinite(range.high) || range.high < range.low) {
        throwInvalid(name, range.high, concat("finite, ", range.low, " (the lower bound) or more"));
      }
      low_[axis] = std::log(range.low);
      high_[axis] = std::log(range.high);
    }
  }

  GaussianProcess run() {
    std::array<int, 3> steps{};
    std::transform(low_.begin(), low_.end(), high_.begin(), steps.begin(),
                   [](double low, double high) { return high > low ? kGrid : 1; });
    for (int length = 0; length < steps[0]; ++length) {
      for (int signal = 0; signal < steps[1]; ++signal) {
        for (int noise = 0; noise < steps[2]; ++noise) {
          consider({gridPoint(0, length), gridPoint(1, signal), gridPoint(2, noise)});
        }
      }
    }
    refine();
    return process(best_);
  }

 private:
  using Point = std::array<double, 3>;

  double gridPoint(std::size_t axis, int step) const {
    return low_[axis] + (high_[axis] - low_[axis]) * step / (kGrid - 1);
  }

  GaussianProcess process(const Point& point) const {
    return GaussianProcess(x_, y_, Hyperparameters{0, std::exp(point[0]), std::exp(point[1]), std::exp(point[2])},
                           true);
  }

  bool consider(const Point& point) {
    const double likelihood = process(point).logMarginalLikelihood();
    // The first one counts whatever its value: there is always an answer.
    if (seen_ && !(likelihood > likelihood_)) {
      return false;
    }
    seen_ = true;
    likelihood_ = likelihood;
    best_ = point;
    return true;
  }

  // Along each axis by half a grid step, that halved whenever no direction is better.
  void refine() {
    double fraction = 0.5 / (kGrid - 1);
    while (coarse(fraction)) {
      if (!improve(fraction)) {
        fraction /= 2;
      }
    }
  }

  bool coarse(double fraction) const {
    bool result = false;
    for (std::size_t axis = 0; axis < best_.size(); ++axis) {
      result = result || (high_[axis] - low_[axis]) * fraction > kPrecision;
    }
    return result;
  }

  bool improve(double fraction) {
    bool moved = false;
    for (std::size_t axis = 0; axis < best_.size(); ++axis) {
      for (const double step : {-fraction, fraction}) {
        Point point = best_;
        point[axis] = std::clamp(point[axis] + step * (high_[axis] - low_[axis]), low_[axis], high_[axis]);
        moved = (point[axis] != best_[axis] && consider(point)) || moved;
      }
    }
    return moved;
  }

  const std::vector<double>& x_;
  const std::vector<double>& y_;
  Point low_{};
  Point high_{};
  Point best_{};
  double likelihood_ = 0;
  bool seen_ = false;
};

GaussianProcess fitGaussianProcess(const std::vector<double>& x, const std::vector<double>& y,
                                   const HyperparameterRanges& ranges) {
  checkPoints(x, y);
  return HyperparameterSearch(x, y, ranges).run();
}

RepeatNoise noiseFromRepeats(const std::vector<double>& x, const std::vector<double>& y) {
  checkPoints(x, y);
  std::map<double, std::vector<double>> groups;
  for (std::size_t i = 0; i < x.size(); ++i) {
    groups[x[i]].push_back(y[i]);
  }
  RepeatNoise noise;
  double squares = 0;
  for (const auto& [place, values] : groups) {
    const auto count = static_cast<double>(values.size());
    const double mean = std::accumulate(values.begin(), values.end(), 0.0) / count;
    for (const double value : values) {
      squares += (value - mean) * (value - mean);
    }
    noise.degrees_of_freedom += static_cast<int>(values.size()) - 1;
  }
  if (noise.degrees_of_freedom > 0) {
    noise.variance = squares / noise.degrees_of_freedom;
  }
  return noise;
}

}  // namespace torchext::core
