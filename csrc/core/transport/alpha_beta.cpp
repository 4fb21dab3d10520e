#include "core/transport/alpha_beta.h"

#include <cmath>

#include "core/base/check.h"

namespace torchext::core {

// Weighted least squares, weights 1 / y^2; a coefficient that would be negative is 0 and the other is fitted alone.
TimeLine fitTimeLine(const std::vector<TimedSize>& samples, const char* what) {
  double w = 0;
  double wx = 0;
  double wxx = 0;
  double wy = 0;
  double wxy = 0;
  bool two_sizes = false;
  for (const auto& [x, y] : samples) {
    if (!std::isfinite(y) || y <= 0) {
      throwInvalid("seconds", y, "finite and above 0");
    }
    const double weight = 1 / (y * y);
    two_sizes = two_sizes || x != samples.front().size;
    w += weight;
    wx += weight * x;
    wxx += weight * x * x;
    wy += weight * y;
    wxy += weight * x * y;
  }
  if (!two_sizes) {
    throwInvalid(what, samples.size(), "samples of two different sizes or more");
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

AlphaBeta fitAlphaBeta(const std::vector<CommSample>& samples) {
  std::vector<TimedSize> sizes;
  sizes.reserve(samples.size());
  for (const auto& sample : samples) {
    sizes.push_back({static_cast<double>(sample.bytes), sample.seconds});
  }
  const TimeLine line = fitTimeLine(sizes, "samples of communication");
  return {line.offset, line.slope};
}

}  // namespace torchext::core
