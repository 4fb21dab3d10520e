#include "core/kfac/per_sample_choice.h"

#include <algorithm>

namespace torchext::core {
namespace {

// Of a layer's, to keep rows and to compare: a gradient is read once more.
constexpr double kFixed = 50e-6;       // seconds
constexpr double kAnElement = 0.2e-9;  // seconds, from memory
// What is saved is to be more than predictions are wrong by.
constexpr double kLeastShare = 0.2;
constexpr double kWrittenAhead = 0.5e-9;  // seconds an element that are saved

}  // namespace

double shareOfRows(std::size_t outputs, std::size_t inputs, std::size_t rows) {
  const auto out = static_cast<double>(outputs);
  const auto in = static_cast<double>(inputs);
  return static_cast<double>(rows) * (out * out + in * in + out * in) / (out * in * (out + in));
}

std::vector<bool> chooseRows(const std::vector<RowLayer>& layers, const AlphaBeta& gather, bool ahead) {
  std::vector<double> gains;
  gains.reserve(layers.size());
  RowLayer all_together{.rows = 1};
  double gain_together = 0;
  for (const RowLayer& layer : layers) {
    const auto elements = static_cast<double>(layer.outputs) * static_cast<double>(layer.inputs);
    gains.push_back(layer.otherwise - layer.seconds * shareOfRows(layer.outputs, layer.inputs, layer.rows) - kFixed -
                    kAnElement * elements - gather.beta * static_cast<double>(layer.bytes));
    if (layer.together) {
      all_together.rows = std::min(all_together.rows, layer.rows);
      all_together.otherwise += layer.otherwise;
      gain_together += gains.back();
    }
  }
  const auto pays = [](const RowLayer& layer, double gain) {
    return layer.rows > 0 && gain > kLeastShare * layer.otherwise;
  };
  std::vector<bool> chosen;
  chosen.reserve(layers.size());
  double saved = 0;
  double written_ahead = 0;
  double of_others = 0;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    chosen.push_back(layers[i].together ? pays(all_together, gain_together) : pays(layers[i], gains[i]));
    (chosen.back() ? saved : of_others) += gains[i];
    written_ahead +=
        kWrittenAhead *
        (chosen.back() ? static_cast<double>(layers[i].outputs) * static_cast<double>(layers[i].inputs) : 0);
    ahead = ahead && layers[i].rows > 0;
  }
  if (saved <= gather.alpha) {
    chosen.assign(layers.size(), false);
  } else if (ahead && of_others + written_ahead > 0) {
    chosen.assign(layers.size(), true);
  }
  return chosen;
}

}  // namespace torchext::core
