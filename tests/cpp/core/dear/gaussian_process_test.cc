#include "core/dear/gaussian_process.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <stdexcept>
#include <utility>
#include <vector>

#include "core/base/random.h"
#include "tests/cpp/core/base/expect_throw.h"

namespace torchext::core {
namespace {

using Values = std::vector<double>;
using Matrix = std::vector<Values>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr HyperparameterRanges kWide{{0.05, 20}, {1e-4, 100}, {1e-6, 10}};

// begin, begin + step, ... below end.
Values range(double begin, double end, double step) {
  Values values;
  while (begin + static_cast<double>(values.size()) * step < end) {
    values.push_back(begin + static_cast<double>(values.size()) * step);
  }
  return values;
}

TEST(Matern52, ItsFormula) {
  EXPECT_DOUBLE_EQ(matern52(0, 3), 1);
  EXPECT_DOUBLE_EQ(matern52(2, 3), matern52(-2, 3));
  // By hand at distance = length: (1 + sqrt 5 + 5/3) exp(-sqrt 5) = 4.90273464 * 0.10687792 = 0.52399411.
  EXPECT_NEAR(matern52(1, 1), 0.52399411, 1e-8);
  EXPECT_NEAR(matern52(7, 7), 0.52399411, 1e-8);
  EXPECT_LT(matern52(100, 1), 1e-90);
}

// One point: k / (s + n) of the residual; two points: the inverse of a 2 x 2 matrix by hand.
TEST(GaussianProcess, OnePointInClosedForm) {
  const Hyperparameters hyper{1.5, 2, 0.8, 0.1};
  const GaussianProcess process({3}, {2.5}, hyper);
  for (const double x : {-1.0, 2.0, 3.0, 10.0}) {
    const double k = 0.8 * matern52(x - 3, 2);
    EXPECT_NEAR(process.at(x).mean, 1.5 + k / 0.9 * 1.0, 1e-12);
    EXPECT_NEAR(process.at(x).variance, 0.8 - k * k / 0.9, 1e-12);
  }
  EXPECT_NEAR(process.logMarginalLikelihood(), -0.5 * (1 / 0.9 + std::log(0.9) + std::log(2 * std::numbers::pi)),
              1e-12);
}

TEST(GaussianProcess, TwoPointsInClosedForm) {
  const GaussianProcess process({0, 1}, {1, -2}, Hyperparameters{0, 1, 1, 0.25});
  const double rho = matern52(1, 1);
  const double det = 1.25 * 1.25 - rho * rho;
  const double weight0 = (1.25 * 1 - rho * -2) / det;
  const double weight1 = (1.25 * -2 - rho * 1) / det;
  const double k0 = matern52(0.3, 1);
  const double k1 = matern52(0.7, 1);
  EXPECT_NEAR(process.at(0.3).mean, k0 * weight0 + k1 * weight1, 1e-12);
  EXPECT_NEAR(process.at(0.3).variance, 1 - (1.25 * k0 * k0 - 2 * rho * k0 * k1 + 1.25 * k1 * k1) / det, 1e-12);
  EXPECT_NEAR(process.logMarginalLikelihood(),
              -0.5 * (1 * weight0 - 2 * weight1 + std::log(det)) - std::log(2 * std::numbers::pi), 1e-12);
}

// Gauss-Jordan with pivoting, and the determinant: nothing in common with a Cholesky factor.
Matrix inverse(Matrix a, double& determinant) {
  const std::size_t n = a.size();
  Matrix result(n, Values(n, 0.0));
  determinant = 1;
  for (std::size_t i = 0; i < n; ++i) {
    result[i][i] = 1;
  }
  for (std::size_t column = 0; column < n; ++column) {
    std::size_t pivot = column;
    for (std::size_t row = column + 1; row < n; ++row) {
      pivot = std::abs(a[row][column]) > std::abs(a[pivot][column]) ? row : pivot;
    }
    if (pivot != column) {
      std::swap(a[pivot], a[column]);
      std::swap(result[pivot], result[column]);
      determinant = -determinant;
    }
    determinant *= a[column][column];
    const double scale = a[column][column];
    for (std::size_t j = 0; j < n; ++j) {
      a[column][j] /= scale;
      result[column][j] /= scale;
    }
    for (std::size_t row = 0; row < n; ++row) {
      const double factor = row == column ? 0 : a[row][column];
      for (std::size_t j = 0; j < n; ++j) {
        a[row][j] -= factor * a[column][j];
        result[row][j] -= factor * result[column][j];
      }
    }
  }
  return result;
}

double quadratic(const Values& left, const Matrix& matrix, const Values& right) {
  double sum = 0;
  for (std::size_t i = 0; i < left.size(); ++i) {
    for (std::size_t j = 0; j < right.size(); ++j) {
      sum += left[i] * matrix[i][j] * right[j];
    }
  }
  return sum;
}

TEST(GaussianProcess, AgreesWithTheExplicitInverse) {
  Random random(4);
  for (int round = 0; round < 50; ++round) {
    const std::size_t n = 1 + random.below(12);
    const Hyperparameters hyper{random.uniform(), 0.3 + random.uniform(), 0.5 + random.uniform(),
                                0.05 + 0.1 * random.uniform()};
    Values x;
    Values y;
    for (std::size_t i = 0; i < n; ++i) {
      x.push_back(i > 0 && random.below(4) == 0 ? x.back() : 6 * random.uniform());
      y.push_back(2 * random.uniform());
    }
    Matrix covariance(n, Values(n));
    Values residuals;
    for (std::size_t i = 0; i < n; ++i) {
      residuals.push_back(y[i] - hyper.mean);
      for (std::size_t j = 0; j < n; ++j) {
        const double r = std::sqrt(5.0) * std::abs(x[i] - x[j]) / hyper.length_scale;
        covariance[i][j] = hyper.signal_variance * (1 + r + r * r / 3) * std::exp(-r);
      }
      covariance[i][i] += hyper.noise_variance;
    }
    double determinant = 0;
    const Matrix inverted = inverse(covariance, determinant);
    const GaussianProcess process(x, y, hyper);
    ASSERT_NEAR(process.logMarginalLikelihood(),
                -0.5 * (quadratic(residuals, inverted, residuals) + std::log(determinant) +
                        static_cast<double>(n) * std::log(2 * std::numbers::pi)),
                1e-8);
    for (const double place : {-1.0, 0.5, 2.2, 5.9}) {
      Values k;
      for (const double seen : x) {
        k.push_back(hyper.signal_variance * matern52(place - seen, hyper.length_scale));
      }
      ASSERT_NEAR(process.at(place).mean, hyper.mean + quadratic(k, inverted, residuals), 1e-8);
      ASSERT_NEAR(process.at(place).variance, hyper.signal_variance - quadratic(k, inverted, k), 1e-8);
    }
  }
}

TEST(GaussianProcess, WithoutNoiseItInterpolates) {
  const Values x{0, 1, 2.5, 4, 7};
  const Values y{1, 3, -2, 0.5, 0.25};
  const GaussianProcess process(x, y, Hyperparameters{0, 1.5, 2, 0});
  for (std::size_t i = 0; i < x.size(); ++i) {
    EXPECT_NEAR(process.at(x[i]).mean, y[i], 1e-9);
    EXPECT_NEAR(process.at(x[i]).variance, 0, 1e-9);
  }
}

TEST(GaussianProcess, VarianceGrowsWithTheDistanceAndFallsWithEveryPoint) {
  const Hyperparameters hyper{0, 2, 1, 0.01};
  const GaussianProcess one({0}, {1}, hyper);
  double before = 0;
  for (const double x : range(0, 12, 0.25)) {
    const double variance = one.at(x).variance;
    EXPECT_GT(variance, before) << x;
    EXPECT_LE(variance, 1) << x;
    before = variance;
  }
  EXPECT_NEAR(before, 1, 1e-3);  // far away only the prior is left
  EXPECT_NEAR(one.at(40).mean, 0, 1e-12);
  const GaussianProcess two({0, 3}, {1, -5}, hyper);
  const GaussianProcess repeated({0, 0}, {1, 1}, hyper);
  for (const double x : range(-5, 8, 0.25)) {
    EXPECT_LT(two.at(x).variance, one.at(x).variance) << x;
    EXPECT_LE(repeated.at(x).variance, one.at(x).variance) << x;
  }
  EXPECT_LT(repeated.at(0).variance, 0.6 * one.at(0).variance);  // two measurements: about half the noise
}

TEST(GaussianProcess, EqualPointsWithoutNoiseAreNoError) {
  const GaussianProcess process({2, 2, 2, 5}, {1, 1, 1, 3}, Hyperparameters{0, 1, 1, 0});
  EXPECT_NEAR(process.at(2).mean, 1, 1e-6);
  EXPECT_NEAR(process.at(5).mean, 3, 1e-6);
  EXPECT_NEAR(process.at(2).variance, 0, 1e-6);
  const GaussianProcess contradiction({2, 2}, {1, 3}, Hyperparameters{0, 1, 1, 0});
  EXPECT_TRUE(std::isfinite(contradiction.at(2).mean));
  EXPECT_TRUE(std::isfinite(contradiction.logMarginalLikelihood()));
  // Ever longer correlations make the matrix singular in double precision.
  const GaussianProcess flat({0, 1, 2, 3, 4, 5}, {1, 1, 1, 1, 1, 1}, Hyperparameters{0, 1e9, 1, 0});
  EXPECT_NEAR(flat.at(2.5).mean, 1, 1e-3);
}

TEST(Fit, BeatsEveryPointOfAFineGrid) {
  const Values x{0, 1, 2, 3, 4, 5, 6, 7};
  Values y;
  Random random(5);
  for (const double place : x) {
    y.push_back(std::sin(place) + 0.2 * (random.uniform() - 0.5));
  }
  const GaussianProcess fitted = fitGaussianProcess(x, y, kWide);
  for (const double length : range(std::log(0.05), std::log(20), 0.2)) {
    for (const double signal : range(std::log(1e-4), std::log(100), 0.5)) {
      for (const double noise : range(std::log(1e-6), std::log(10), 0.5)) {
        const Hyperparameters hyper{fitted.hyperparameters().mean, std::exp(length), std::exp(signal), std::exp(noise)};
        ASSERT_LE(GaussianProcess(x, y, hyper).logMarginalLikelihood(), fitted.logMarginalLikelihood() + 1e-3);
      }
    }
  }
  // The mean is a maximum too.
  for (const double change : {-0.01, 0.01}) {
    Hyperparameters hyper = fitted.hyperparameters();
    hyper.mean += change;
    EXPECT_LT(GaussianProcess(x, y, hyper).logMarginalLikelihood(), fitted.logMarginalLikelihood());
  }
}

TEST(Fit, FindsTheFunctionAndTheNoise) {
  Random random(6);
  Values x;
  Values y;
  const auto normal = [&] {  // Box-Muller
    return std::sqrt(-2 * std::log(1 - random.uniform())) * std::cos(2 * std::numbers::pi * random.uniform());
  };
  for (int i = 0; i < 40; ++i) {
    x.push_back(i * 0.2);
    y.push_back(std::sin(x.back()) + 5 + 0.1 * normal());
  }
  const GaussianProcess process = fitGaussianProcess(x, y, kWide);
  EXPECT_NEAR(std::sqrt(process.hyperparameters().noise_variance), 0.1, 0.03);
  EXPECT_NEAR(process.hyperparameters().mean, 5, 0.6);
  for (const double place : range(0.5, 7.5, 0.5)) {
    EXPECT_NEAR(process.at(place).mean, std::sin(place) + 5, 0.12) << place;
  }
}

TEST(Fit, StaysInsideTheRangesAndIsDeterministic) {
  const Values x{0, 1, 2, 3};
  const Values y{5, -5, 5, -5};
  const HyperparameterRanges ranges{{1, 2}, {0.5, 0.5}, {0.01, 0.02}};
  const Hyperparameters hyper = fitGaussianProcess(x, y, ranges).hyperparameters();
  EXPECT_NEAR(hyper.length_scale, 1, 1e-12);  // would be shorter and noisier
  EXPECT_NEAR(hyper.signal_variance, 0.5, 1e-12);
  EXPECT_NEAR(hyper.noise_variance, 0.02, 1e-12);
  EXPECT_EQ(fitGaussianProcess(x, y, kWide).at(1.3).mean, fitGaussianProcess(x, y, kWide).at(1.3).mean);
}

TEST(Fit, DegenerateInput) {
  const GaussianProcess constant = fitGaussianProcess({1, 2, 3}, {4, 4, 4}, kWide);
  EXPECT_NEAR(constant.at(2.5).mean, 4, 1e-9);
  EXPECT_LT(constant.at(2.5).variance, 1e-3);
  const GaussianProcess single = fitGaussianProcess({1}, {7}, kWide);
  EXPECT_NEAR(single.at(9).mean, 7, 1e-9);
  const GaussianProcess repeats = fitGaussianProcess({1, 1, 1, 1}, {1, 2, 3, 4}, kWide);
  EXPECT_NEAR(repeats.at(1).mean, 2.5, 1e-9);
  EXPECT_GT(repeats.hyperparameters().noise_variance, 0.5);  // nothing but noise explains them
}

TEST(NoiseFromRepeats, PoolsOverPlaces) {
  const RepeatNoise noise = noiseFromRepeats({1, 2, 1, 3, 2, 1}, {1, 10, 2, 5, 14, 3});
  EXPECT_EQ(noise.degrees_of_freedom, 3);
  EXPECT_DOUBLE_EQ(noise.variance, (2.0 + 8.0) / 3);
  EXPECT_EQ(noiseFromRepeats({1, 2}, {5, 6}).degrees_of_freedom, 0);
  EXPECT_EQ(noiseFromRepeats({1, 2}, {5, 6}).variance, 0);
}

TEST(GaussianProcess, BadInputNamesValueAndRange) {
  const Hyperparameters hyper;
  EXPECT_THROW_MESSAGE(GaussianProcess({}, {}, hyper), std::invalid_argument, "number of points = 0");
  EXPECT_THROW_MESSAGE(GaussianProcess({1}, {}, hyper), std::invalid_argument, "size of y = 0: allowed 1");
  EXPECT_THROW_MESSAGE(GaussianProcess({kInfinity}, {1}, hyper), std::invalid_argument, "x = inf");
  EXPECT_THROW_MESSAGE(GaussianProcess({1}, {kInfinity}, hyper), std::invalid_argument, "y = inf: allowed finite");
  EXPECT_THROW_MESSAGE(GaussianProcess({1}, {1}, {0, 0, 1, 0}), std::invalid_argument, "length_scale = 0");
  EXPECT_THROW_MESSAGE(GaussianProcess({1}, {1}, {0, 1, -1, 0}), std::invalid_argument, "signal_variance = -1");
  EXPECT_THROW_MESSAGE(GaussianProcess({1}, {1}, {0, 1, 1, -1}), std::invalid_argument, "noise_variance = -1");
  EXPECT_THROW_MESSAGE(GaussianProcess({1}, {1}, {kInfinity, 1, 1, 0}), std::invalid_argument, "mean = inf");
  EXPECT_THROW_MESSAGE(static_cast<void>(GaussianProcess({1}, {1}, hyper).at(-kInfinity)), std::invalid_argument,
                       "x = -inf: allowed finite");
  EXPECT_THROW_MESSAGE(fitGaussianProcess({}, {}, kWide), std::invalid_argument, "number of points = 0");
  EXPECT_THROW_MESSAGE(fitGaussianProcess({1}, {1}, {{0, 1}, {1, 1}, {1, 1}}), std::invalid_argument,
                       "length_scale = 0");
  EXPECT_THROW_MESSAGE(fitGaussianProcess({1}, {1}, {{1, 1}, {2, 1}, {1, 1}}), std::invalid_argument,
                       "signal_variance = 1: allowed finite, 2");
  EXPECT_THROW_MESSAGE(noiseFromRepeats({1}, {}), std::invalid_argument, "size of y = 0");
}

}  // namespace
}  // namespace torchext::core
