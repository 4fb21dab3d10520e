#include "kfac/factors/kfac_statistics.h"

#include "core/kfac/packed_triangle.h"

namespace torchext {

KfacStatistics::KfacStatistics(const std::vector<KfacLayerSpec>& layers, const at::TensorOptions& options,
                               FactorScaling scaling)
    : layers_(layers), scaling_(scaling), first_slot_(layers.size()), steps_(layers.size()) {
  std::int64_t offset = 0;
  const auto place = [&](FactorSlot slot) {
    slot.offset = offset;
    const auto dim = static_cast<std::size_t>(slot.dim);
    slot.size = slot.count * (slot.diagonal ? slot.dim : static_cast<std::int64_t>(core::packedSize(dim)));
    offset += slot.size;
    slots_.push_back(slot);
  };
  for (std::size_t layer = layers.size(); layer-- > 0;) {  // the backward pass comes to the last one first
    const KfacLayerSpec& spec = layers[layer];
    const int number = static_cast<int>(layer);
    first_slot_[layer] = slots_.size();
    place({number, false, false, spec.outputs(), spec.groups});
    place({number, true, spec.diagonalInput(), spec.inputDim(), spec.groups});
  }
  running_ = at::zeros({offset}, options);
  sums_ = at::zeros({offset}, options);
  for (const FactorSlot& slot : slots_) {
    slice(running_, slot).index_fill_(0, diagonalPlaces(slot).to(options.device()), 1);
  }
}

at::Tensor KfacStatistics::diagonalPlaces(const FactorSlot& slot) {
  const auto dim = static_cast<std::size_t>(slot.dim);
  at::Tensor places = at::empty({slot.count * slot.dim}, at::kLong);
  auto* to = places.mutable_data_ptr<std::int64_t>();
  for (std::int64_t group = 0; group < slot.count; ++group) {
    for (std::size_t i = 0; i < dim; ++i) {
      const auto row = slot.diagonal ? i : core::packedRow(i, dim);
      *to++ = group * slot.triangle() + static_cast<std::int64_t>(row);
    }
  }
  return places;
}

void KfacStatistics::add(int layer, const at::Tensor& input, const at::Tensor& gradient, int backward_pass,
                         bool at_once) {
  const auto number = static_cast<std::size_t>(layer);
  LayerStep& step = steps_[number];
  const FactorSlot& output_slot = slots_[first_slot_[number]];
  const FactorSlot& input_slot = slots_[first_slot_[number] + 1];
  const CallSize call =
      addProducts(layers_[number], output_slot, input_slot, input, gradient, step.calls == 0, at_once);
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

double KfacStatistics::weightOf(const FactorSlot& slot, double decay, double loss_scale) const {
  const auto layer = static_cast<std::size_t>(slot.layer);
  const auto samples = static_cast<double>(steps_[layer].samples);
  const auto rows = static_cast<double>(steps_[layer].rows);
  const double unscaled = slot.input_side ? 1.0 : 1.0 / (loss_scale * loss_scale);
  if (scaling_ == FactorScaling::kKfc) {
    return (1 - decay) * (slot.input_side ? 1 / samples : unscaled * samples * samples / rows);
  }
  const bool convolution = layers_[layer].kind == KfacLayerSpec::Kind::kConvolution;
  const double positions = convolution ? rows / samples : 1.0;
  return (1 - decay) * unscaled / (rows * positions * positions);
}

void KfacStatistics::preview(const FactorSlot& slot, double decay, double loss_scale, const at::Tensor& out) {
  average({{&slot, weightOf(slot, decay, loss_scale)}}, decay, out);
}

void KfacStatistics::merge(double decay, double loss_scale) {
  std::vector<Share> shares;
  shares.reserve(slots_.size());
  for (const FactorSlot& slot : slots_) {
    if (steps_[static_cast<std::size_t>(slot.layer)].calls > 0) {
      shares.push_back({&slot, weightOf(slot, decay, loss_scale)});
    }
  }
  averageInPlace(shares, decay);
  discard();
}

void KfacStatistics::discard() {
  for (LayerStep& step : steps_) {
    step = {};
  }
}

}  // namespace torchext
