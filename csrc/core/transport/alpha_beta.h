// AlphaBeta says what one transfer costs: start-up time, and time a byte. It is a straight line through measured times.
//
// Pure functions of the samples; every rank must pass the same samples to come to the same plan. Times are seconds.
#pragma once

#include <cstddef>
#include <vector>

namespace torchext::core {

// Both are finite, 0 or more.
// A ring of n ranks with link latency a and bandwidth B: alpha = (n-1) a, beta = (n-1) / (n B), for each of
// reduce-scatter and all-gather.
struct AlphaBeta {
  double alpha = 0;  // seconds
  double beta = 0;   // seconds a byte
  double seconds(std::size_t bytes) const { return alpha + beta * static_cast<double>(bytes); }
};

struct CommSample {
  std::size_t bytes = 0;
  double seconds = 0;
};
// The line with the least sum of squared *relative* errors (small messages count as much as large ones), with alpha and
// beta 0 or more. Needs two different sizes and times above 0; std::invalid_argument otherwise.
AlphaBeta fitAlphaBeta(const std::vector<CommSample>& samples);

// The same line of any size. what: the samples, in errors.
struct TimedSize {
  double size = 0;
  double seconds = 0;
};
struct TimeLine {
  double offset = 0;  // seconds
  double slope = 0;   // seconds a unit of size
};
TimeLine fitTimeLine(const std::vector<TimedSize>& samples, const char* what);

}  // namespace torchext::core
