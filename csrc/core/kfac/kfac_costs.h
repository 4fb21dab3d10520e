// InversionCost says what inverting a factor costs on this machine: a line through measured times, by which a plan is
// made. (Shi et al., ICDCS 2021, section V, which has t_ar(n) = alpha + beta n for transfers, too: alpha_beta.h.)
//
// Pure functions of the samples; every rank must pass the same samples to come to the same plan. Times are seconds.
#pragma once

#include <cstddef>
#include <vector>

namespace torchext::core {

struct InversionSample {
  std::size_t dim = 0;
  double seconds = 0;
};
// t(d) = fixed + cubic d^3. The paper's a exp(b d) fits its range of 64..8192, but grows without bound beyond it and
// overrates small factors; what LAPACK does is d^3 after a constant.
struct InversionCost {
  double fixed = 0;  // seconds
  double cubic = 0;  // seconds
  double seconds(std::size_t dim) const {
    const auto d = static_cast<double>(dim);
    return fixed + cubic * d * d * d;
  }
};
// Fitted as fitAlphaBeta() is, on the same conditions.
InversionCost fitInversion(const std::vector<InversionSample>& samples);

}  // namespace torchext::core
