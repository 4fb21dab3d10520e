#include "core/kfac/kfac_costs.h"

#include "core/transport/alpha_beta.h"

namespace torchext::core {

InversionCost fitInversion(const std::vector<InversionSample>& samples) {
  std::vector<TimedSize> sizes;
  sizes.reserve(samples.size());
  for (const auto& sample : samples) {
    const auto d = static_cast<double>(sample.dim);
    sizes.push_back({d * d * d, sample.seconds});
  }
  const TimeLine line = fitTimeLine(sizes, "samples of inversions");
  return {line.offset, line.slope};
}

}  // namespace torchext::core
