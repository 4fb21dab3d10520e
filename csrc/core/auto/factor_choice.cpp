#include "core/auto/factor_choice.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "core/base/check.h"

namespace torchext::core {

std::size_t layerBytes(const StepProfile& profile, int layer) {
  std::size_t sum = 0;
  for (const Gradient& gradient : profile.gradients) {
    sum += gradient.layer == layer ? gradient.bytes : 0;
  }
  return sum;
}

double extraFactorSeconds(const LayerRows& layer, const LinkModel& link) {
  return link.operations_per_second > 0 ? extraOperations(layer, link.network.ranks) / link.operations_per_second : 0;
}

std::vector<FactorGain> eligibleFactors(const StepProfile& profile, const LinkModel& link, const BucketCost& saved) {
  std::vector<FactorGain> eligible;
  for (std::size_t i = 0; link.rows && i < profile.layers.size(); ++i) {
    const LayerRows& layer = profile.layers[i];
    const int number = static_cast<int>(i);
    const std::size_t bytes = layerBytes(profile, number);
    if (layer.rows == 0 || bytes == 0) {
      continue;
    }
    const double gain =
        saved(bytes) - link.rows->seconds(static_cast<std::size_t>(rowBytes(layer))) - extraFactorSeconds(layer, link);
    if (gain > 0) {
      eligible.push_back({number, gain});
    }
  }
  std::stable_sort(eligible.begin(), eligible.end(),
                   [](const FactorGain& a, const FactorGain& b) { return a.seconds > b.seconds; });
  return eligible;
}

std::vector<int> chooseFactors(const std::vector<FactorGain>& eligible,
                               const std::function<double(const std::vector<int>&)>& step) {
  std::vector<int> chosen;
  double least = step(chosen);
  for (const FactorGain& gain : eligible) {
    std::vector<int> more = chosen;
    more.insert(std::upper_bound(more.begin(), more.end(), gain.layer), gain.layer);
    const double seconds = step(more);
    if (seconds < least) {
      least = seconds;
      chosen = std::move(more);
    }
  }
  return chosen;
}

}  // namespace torchext::core
