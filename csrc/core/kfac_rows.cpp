#include "core/kfac_rows.h"

namespace torchext::core {
namespace {

// Of a layer's, to keep rows and to compare: a gradient is read once more.
constexpr double kFixed = 50e-6;       // seconds
constexpr double kAnElement = 0.2e-9;  // seconds, from memory
// What is saved is to be more than predictions are wrong by.
constexpr double kLeastShare = 0.2;

}  // namespace

double shareOfRows(std::size_t outputs, std::size_t inputs, std::size_t rows) {
  const auto out = static_cast<double>(outputs);
  const auto in = static_cast<double>(inputs);
  return static_cast<double>(rows) * (out * out + in * in + out * in) / (out * in * (out + in));
}

std::vector<bool> chooseRows(const std::vector<RowLayer>& layers, const AlphaBeta& gather) {
  std::vector<bool> chosen;
  chosen.reserve(layers.size());
  double saved = 0;
  for (const RowLayer& layer : layers) {
    const auto elements = static_cast<double>(layer.outputs) * static_cast<double>(layer.inputs);
    const double gain = layer.seconds * (1 - shareOfRows(layer.outputs, layer.inputs, layer.rows)) - kFixed -
                        kAnElement * elements - gather.beta * static_cast<double>(layer.bytes);
    chosen.push_back(layer.rows > 0 && gain > kLeastShare * layer.seconds);
    saved += chosen.back() ? gain : 0;
  }
  if (saved <= gather.alpha) {
    chosen.assign(layers.size(), false);
  }
  return chosen;
}

}  // namespace torchext::core
