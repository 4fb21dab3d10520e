#include "core/dear/step_times.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>

#include "core/base/check.h"

namespace torchext::core {
namespace {

void checkAny(const std::vector<double>& values) {
  if (values.empty()) {
    throwInvalid("values", "[]", "one or more");
  }
}

// Of the mean.
double squaredStandardError(const std::vector<double>& values) {
  const double center = mean(values);
  double squares = 0;
  for (const double value : values) {
    squares += (value - center) * (value - center);
  }
  const auto count = static_cast<double>(values.size());
  return squares / (count * (count - 1));
}

}  // namespace

double median(std::vector<double> values) {
  checkAny(values);
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return values.size() % 2 == 1 ? *middle : (*middle + *std::max_element(values.begin(), middle)) / 2;
}

double mean(const std::vector<double>& values) {
  checkAny(values);
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

bool clearlyFaster(const std::vector<double>& candidate, const std::vector<double>& reference, double standard_errors) {
  if (candidate.size() < 2 || reference.size() < 2) {
    return false;
  }
  const double error = std::sqrt(squaredStandardError(candidate) + squaredStandardError(reference));
  return mean(reference) - mean(candidate) > standard_errors * error;
}

}  // namespace torchext::core
