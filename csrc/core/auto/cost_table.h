// CostTable answers what a message of any size takes, from the times that were measured at a few sizes.
//
// Measured times are noisy, and a straight line fits short and long messages badly at once (short ones ride in
// buffers). So the table is piecewise linear, and it is made monotone: a size takes as long as the fastest of the same
// size or larger. An immutable value. Bytes and seconds.
#pragma once

#include <cstddef>
#include <vector>

namespace torchext::core {

struct CostPoint {
  std::size_t bytes = 0;
  double seconds = 0;
  friend bool operator==(const CostPoint&, const CostPoint&) = default;
};

class CostTable {
 public:
  // Sizes strictly ascending, times finite and 0 or more, one point at least; std::invalid_argument otherwise.
  explicit CostTable(std::vector<CostPoint> measured);
  // alpha + beta * bytes, exactly so at every size.
  static CostTable line(double alpha_seconds, double beta_seconds_per_byte);

  // Below the first point that point's time; beyond the last one the slope of the last segment that rises, or of the
  // line from the origin where none does: a size that was not measured is never free. O(log points).
  double seconds(std::size_t bytes) const;
  // Monotone in both coordinates.
  const std::vector<CostPoint>& points() const { return points_; }

 private:
  std::vector<CostPoint> points_;
  double last_slope_ = 0;  // seconds a byte beyond the last point
};

}  // namespace torchext::core
