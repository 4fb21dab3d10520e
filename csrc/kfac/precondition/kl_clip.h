// K-FAC's clip of a step's directions, by how much they change what the model says (its KL divergence).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <optional>
#include <vector>

namespace torchext {

// nu = min(1, sqrt(kl_clip / |sum of rates[layer]^2 products[layer]|)); 1 without kl_clip. products: <V, dW>.
inline double klClip(std::optional<double> kl_clip, const std::vector<double>& rates,
                     const std::vector<double>& products) {
  if (!kl_clip) {
    return 1;
  }
  double sum = 0;
  for (std::size_t layer = 0; layer < products.size(); ++layer) {
    sum += rates[layer] * rates[layer] * products[layer];
  }
  return std::abs(sum) > 0 ? std::min(1.0, std::sqrt(*kl_clip / std::abs(sum))) : 1.0;
}

}  // namespace torchext
