#include "kfac/factors/factor_accumulator.h"

#include <algorithm>

#include "core/kfac/packed_triangle.h"

namespace torchext {

FactorAccumulator::FactorAccumulator(const std::vector<KfacLayerSpec>& layers, const at::TensorOptions& options,
                                     FactorScaling scaling)
    : layers_(layers), scaling_(scaling), first_factor_(layers.size()), steps_(layers.size()) {
  std::int64_t offset = 0;
  const auto place = [&](FactorLayout layout) {
    layout.offset = offset;
    const auto dim = static_cast<std::size_t>(layout.dim);
    layout.size = layout.count * (layout.diagonal ? layout.dim : static_cast<std::int64_t>(core::packedSize(dim)));
    offset += layout.size;
    layouts_.push_back(layout);
  };
  for (std::size_t layer = layers.size(); layer-- > 0;) {  // the backward pass comes to the last one first
    const KfacLayerSpec& spec = layers[layer];
    const int number = static_cast<int>(layer);
    first_factor_[layer] = layouts_.size();
    place({number, false, false, spec.outputs(), spec.groups});
    place({number, true, spec.diagonalInput(), spec.inputDim(), spec.groups});
  }
  running_ = at::zeros({offset}, options);
  sums_ = at::zeros({offset}, options);
  for (const FactorLayout& layout : layouts_) {
    slice(running_, layout).index_fill_(0, diagonalPlaces(layout).to(options.device()), 1);
  }
}

at::Tensor FactorAccumulator::diagonalPlaces(const FactorLayout& layout) {
  const auto dim = static_cast<std::size_t>(layout.dim);
  at::Tensor places = at::empty({layout.count * layout.dim}, at::kLong);
  auto* to = places.mutable_data_ptr<std::int64_t>();
  for (std::int64_t group = 0; group < layout.count; ++group) {
    for (std::size_t i = 0; i < dim; ++i) {
      const auto row = layout.diagonal ? i : core::packedRow(i, dim);
      *to++ = group * layout.triangle() + static_cast<std::int64_t>(row);
    }
  }
  return places;
}

void FactorAccumulator::add(int layer, const at::Tensor& input, const at::Tensor& gradient, int backward_pass) {
  const auto number = static_cast<std::size_t>(layer);
  LayerStep& step = steps_[number];
  const FactorLayout& output_layout = layouts_[first_factor_[number]];
  const FactorLayout& input_layout = layouts_[first_factor_[number] + 1];
  const CallSize call = addProducts(layers_[number], output_layout, input_layout, input, gradient, step.calls == 0);
  if (call.rows == 0) {
    return;  // an empty batch says nothing
  }
  ++step.calls;
  step.rows += call.rows;
  if (backward_pass != step.backward_pass) {
    step.samples += call.samples;
    step.backward_pass = backward_pass;
  }
}

double FactorAccumulator::weightOf(const FactorLayout& layout, double decay, double loss_scale) const {
  const auto layer = static_cast<std::size_t>(layout.layer);
  const auto samples = static_cast<double>(steps_[layer].samples);
  const auto rows = static_cast<double>(steps_[layer].rows);
  const double unscaled = layout.input_side ? 1.0 : 1.0 / (loss_scale * loss_scale);
  if (scaling_ == FactorScaling::kKfc) {
    return (1 - decay) * (layout.input_side ? 1 / samples : unscaled * samples * samples / rows);
  }
  const bool convolution = layers_[layer].kind == KfacLayerSpec::Kind::kConvolution;
  const double positions = convolution ? rows / samples : 1.0;
  return (1 - decay) * unscaled / (rows * positions * positions);
}

void FactorAccumulator::preview(const FactorLayout& layout, double decay, double loss_scale, const at::Tensor& out) {
  average({{&layout, weightOf(layout, decay, loss_scale)}}, decay, out);
}

void FactorAccumulator::merge(double decay, double loss_scale) {
  std::vector<Share> shares;
  shares.reserve(layouts_.size());
  for (const FactorLayout& layout : layouts_) {
    if (steps_[static_cast<std::size_t>(layout.layer)].calls > 0) {
      shares.push_back({&layout, weightOf(layout, decay, loss_scale)});
    }
  }
  averageInPlace(shares, decay);
  discard();
}

void FactorAccumulator::discard() {
  for (LayerStep& step : steps_) {
    step = {};
  }
}

std::unique_ptr<FactorAccumulator> makeAccumulator(const KfacContext& context) {
  const bool doubles = std::any_of(context.layers.begin(), context.layers.end(),
                                   [](const auto& layer) { return layer.weight.scalar_type() == at::kDouble; });
  const at::ScalarType type = doubles ? at::kDouble : at::kFloat;
  const FactorScaling scaling = context.options.scaling;
  return context.on_device
             ? makeAtenAccumulator(context.layers, at::TensorOptions(type).device(context.device), scaling)
             : makeCpuAccumulator(context.layers, type, scaling);
}

}  // namespace torchext
