// GaussianProcess says what a few noisy measurements tell of a smooth function of one number, by regression (Rasmussen
// and Williams, "Gaussian Processes for Machine Learning", 2006, chapters 2 and 5).
//
// y_i = f(x_i) + noise, f ~ GP(mean, signal_variance * Matern 5/2), noise ~ N(0, noise_variance). Matern 5/2 is the
// kernel for functions that are smooth but not infinitely so. Deterministic: equal input gives equal output on one
// machine; other math libraries may differ in the last bits, so one rank computes and tells the others.
// For tens of points: O(n^3) for a process, O(n^2) for a prediction, O(n^2) memory.
#pragma once

#include <vector>

namespace torchext::core {

// Correlation of two values of f at a distance, 1 at 0: (1 + r + r^2/3) exp(-r) with r = sqrt(5) distance /
// length_scale.
double matern52(double distance, double length_scale);

struct Hyperparameters {
  double mean = 0;             // of f before anything is seen; unit of y
  double length_scale = 1;     // unit of x
  double signal_variance = 1;  // unit of y, squared
  double noise_variance = 0;   // unit of y, squared; 0: interpolation
};

// f at one place: what is known of the function, without the noise of a further measurement.
struct Posterior {
  double mean = 0;
  double variance = 0;  // 0 or more
};

class GaussianProcess {
 public:
  // x and y: equally many, one at least, finite. length_scale and signal_variance: above 0, noise_variance: 0 or more;
  // all finite. std::invalid_argument otherwise. Points may coincide: where that makes the covariance singular (no
  // noise), 1e-14 of the signal variance, or the least power of ten times that which helps, is added to its diagonal.
  GaussianProcess(std::vector<double> x, const std::vector<double>& y, const Hyperparameters& hyperparameters);

  // std::invalid_argument unless x is finite.
  Posterior at(double x) const;
  // log p(y | x, hyperparameters).
  double logMarginalLikelihood() const { return log_marginal_likelihood_; }
  const Hyperparameters& hyperparameters() const { return hyperparameters_; }

 private:
  friend class HyperparameterSearch;
  // For the search: the mean is the generalized least-squares one, which maximizes the likelihood.
  GaussianProcess(std::vector<double> x, const std::vector<double>& y, const Hyperparameters& hyperparameters,
                  bool fit_mean);

  void factorize();
  std::vector<double> solveLower(std::vector<double> right) const;
  std::vector<double> solve(std::vector<double> right) const;

  Hyperparameters hyperparameters_;
  std::vector<double> x_;
  std::vector<double> cholesky_;  // lower triangle of the factor, row after row of n
  std::vector<double> weights_;   // covariance^-1 (y - mean)
  double log_marginal_likelihood_ = 0;
};

// Where a hyperparameter is looked for, on a logarithmic scale. low == high fixes it.
struct SearchRange {
  double low;
  double high;
};
struct HyperparameterRanges {
  SearchRange length_scale;
  SearchRange signal_variance;
  SearchRange noise_variance;
};

// The process of maximum log marginal likelihood inside the ranges: the best of a grid of 5 values a free
// hyperparameter, refined by a pattern search to 1 % of each. The mean is the likelihood's own maximum. All bounds must
// be finite, above 0 and low <= high. A few hundred processes.
GaussianProcess fitGaussianProcess(const std::vector<double>& x, const std::vector<double>& y,
                                   const HyperparameterRanges& ranges);

// Noise from repeats: the variance of y around its mean among equal x, pooled over all x.
struct RepeatNoise {
  double variance = 0;
  int degrees_of_freedom = 0;  // points less different x; 0: nothing is repeated, the variance says nothing
};
RepeatNoise noiseFromRepeats(const std::vector<double>& x, const std::vector<double>& y);

}  // namespace torchext::core
