#include "core/kfac/kfac_costs.h"

#include <cmath>

#include "core/base/check.h"

namespace torchext::core {
namespace {

struct Point {
  double x;
  double y;
};

struct Line {
  double offset;
  double slope;
};

// Weighted least squares, weights 1 / y^2; a coefficient that would be negative is 0 and the other is fitted alone.
Line fitLine(const std::vector<Point>& points, const char* what) {
  double w = 0;
  double wx = 0;
  double wxx = 0;
  double wy = 0;
  double wxy = 0;
  bool two_sizes = false;
  for (const auto& [x, y] : points) {
    if (!std::isfinite(y) || y <= 0) {
      throwInvalid("seconds", y, "finite and above 0");
    }
    const double weight = 1 / (y * y);
    two_sizes = two_sizes || x != points.front().x;
    w += weight;
    wx += weight * x;
    wxx += weight * x * x;
    wy += weight * y;
    wxy += weight * x * y;
  }
  if (!two_sizes) {
    throwInvalid(what, points.size(), "samples of two different sizes or more");
  }
  const double slope = (w * wxy - wx * wy) / (w * wxx - wx * wx);
  const double offset = (wy - slope * wx) / w;
  if (slope < 0) {
    return {wy / w, 0};
  }
  if (offset < 0) {
    return {0, wxy / wxx};
  }
  return {offset, slope};
}

}  // namespace

AlphaBeta fitAlphaBeta(const std::vector<CommSample>& samples) {
  std::vector<Point> points;
  points.reserve(samples.size());
  for (const auto& sample : samples) {
    points.push_back({static_cast<double>(sample.bytes), sample.seconds});
  }
  const Line line = fitLine(points, "samples of communication");
  return {line.offset, line.slope};
}

InversionCost fitInversion(const std::vector<InversionSample>& samples) {
  std::vector<Point> points;
  points.reserve(samples.size());
  for (const auto& sample : samples) {
    const auto d = static_cast<double>(sample.dim);
    points.push_back({d * d * d, sample.seconds});
  }
  const Line line = fitLine(points, "samples of inversions");
  return {line.offset, line.slope};
}

}  // namespace torchext::core
