#include "core/auto/cost_table.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/base/check.h"

namespace torchext::core {
namespace {

void checkMeasured(const std::vector<CostPoint>& measured) {
  if (measured.empty()) {
    throwInvalid("number of points of a cost table", 0, "1 or more");
  }
  for (std::size_t i = 0; i < measured.size(); ++i) {
    if (!std::isfinite(measured[i].seconds) || measured[i].seconds < 0) {
      throwInvalid("seconds", measured[i].seconds,
                   concat("finite, 0 or more; they are of ", measured[i].bytes, " bytes"));
    }
    if (i > 0 && measured[i].bytes <= measured[i - 1].bytes) {
      throwInvalid("bytes", measured[i].bytes, concat("more than the size before, ", measured[i - 1].bytes));
    }
  }
}

double slope(const CostPoint& from, const CostPoint& to) {
  return (to.seconds - from.seconds) / static_cast<double>(to.bytes - from.bytes);
}

// Of the last segment that rises; of the line from the origin where none does.
double slopeBeyond(const std::vector<CostPoint>& points) {
  for (std::size_t i = points.size() - 1; i > 0; --i) {
    if (points[i].seconds > points[i - 1].seconds) {
      return slope(points[i - 1], points[i]);
    }
  }
  return points.back().bytes == 0 ? 0 : slope({}, points.back());
}

}  // namespace

CostTable::CostTable(std::vector<CostPoint> measured) : points_(std::move(measured)) {
  checkMeasured(points_);
  for (std::size_t i = points_.size() - 1; i > 0; --i) {
    points_[i - 1].seconds = std::min(points_[i - 1].seconds, points_[i].seconds);
  }
  last_slope_ = slopeBeyond(points_);
}

CostTable CostTable::line(double alpha_seconds, double beta_seconds_per_byte) {
  constexpr std::size_t kSomeBytes = std::size_t{1} << 20U;
  CostTable table(
      {{0, alpha_seconds}, {kSomeBytes, alpha_seconds + beta_seconds_per_byte * static_cast<double>(kSomeBytes)}});
  table.last_slope_ = beta_seconds_per_byte;
  return table;
}

double CostTable::seconds(std::size_t bytes) const {
  const auto above = std::upper_bound(points_.begin(), points_.end(), bytes,
                                      [](std::size_t size, const CostPoint& point) { return size < point.bytes; });
  if (above == points_.begin()) {
    return points_.front().seconds;
  }
  const CostPoint& below = *std::prev(above);
  const double rise = above == points_.end() ? last_slope_ : slope(below, *above);
  return below.seconds + rise * static_cast<double>(bytes - below.bytes);
}

}  // namespace torchext::core
