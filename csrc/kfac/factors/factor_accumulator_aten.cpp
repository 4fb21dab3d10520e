// FactorAccumulator in ATen, on any device: work is queued on the current stream, and nothing waits for it.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kfac/factors/factor_accumulator.h"
#include "kfac/linalg/factor_operators.h"

namespace torchext {
namespace {

using Kind = KfacLayerSpec::Kind;

// Patches take K^2 times the memory of the images: so many bytes of them are made at a time.
constexpr std::int64_t kLargestPatches = std::int64_t{64} << 20;

// [groups, inputs, samples * positions] of dense images [N, C, ...]: a view that goes over every element once for each
// place of the kernel that sees it, made dense.
at::Tensor patchesOf(const KfacLayerSpec& spec, const at::Tensor& images) {
  const std::int64_t in_group = images.size(1) / spec.groups;
  std::vector<std::int64_t> sizes{images.size(0), spec.groups, in_group};
  std::vector<std::int64_t> strides{images.stride(0), in_group * images.stride(1), images.stride(1)};
  std::vector<std::int64_t> order{1, 2};
  const auto spatial = static_cast<std::int64_t>(spec.stride.size());
  for (std::int64_t i = 0; i < spatial; ++i) {
    sizes.push_back(spec.weight.size(2 + i));
    strides.push_back(spec.dilation[static_cast<std::size_t>(i)] * images.stride(2 + i));
    order.push_back(3 + i);
  }
  order.push_back(0);
  for (std::int64_t i = 0; i < spatial; ++i) {
    const auto axis = static_cast<std::size_t>(i);
    const std::int64_t extent = spec.dilation[axis] * (spec.weight.size(2 + i) - 1) + 1;
    sizes.push_back((images.size(2 + i) - extent) / spec.stride[axis] + 1);
    strides.push_back(spec.stride[axis] * images.stride(2 + i));
    order.push_back(3 + spatial + i);
  }
  return images.as_strided(sizes, strides).permute(order).reshape({spec.groups, spec.inputs(), -1});
}

class AtenAccumulator final : public FactorAccumulator {
 public:
  AtenAccumulator(const std::vector<KfacLayerSpec>& layers, const at::TensorOptions& options, FactorScaling scaling)
      : FactorAccumulator(layers, options, scaling) {
    for (const FactorLayout& layout : layouts()) {
      diagonals_.push_back(diagonalPlaces(layout).to(options.device()));
    }
  }

  std::int64_t leftOut() const override {
    return left_out_ + (left_out_there_.defined() ? left_out_there_.item<std::int64_t>() : 0);
  }
  at::Tensor unpacked(const at::Tensor& packed, const FactorLayout& layout) const override {
    return layout.diagonal ? packed.clone() : operators::unpackTriangle(trianglesOf(packed, layout), layout.dim);
  }
  void pack(const at::Tensor& full, const FactorLayout& layout, const at::Tensor& packed) const override {
    operators::packTriangle(trianglesOf(packed, layout), full);
  }
  at::Tensor traces(const at::Tensor& packed, const FactorLayout& layout) const override {
    const auto number = static_cast<std::size_t>(&layout - layouts().data());
    return packed.index_select(0, diagonals_[number]).view({layout.count, layout.dim}).sum(1, false, at::kDouble);
  }

  at::Tensor damping(const at::Tensor& own_mean, const at::Tensor& other_mean, double damping) const override {
    at::Tensor pi = at::sqrt(own_mean / other_mean);
    pi = at::where(at::isfinite(pi).logical_and(pi > 0), pi, at::ones_like(pi));
    return (pi * std::sqrt(damping)).to(type());
  }

 protected:
  CallSize addProducts(const KfacLayerSpec& spec, const FactorLayout& output_layout, const FactorLayout& input_layout,
                       const at::Tensor& input, const at::Tensor& gradient, bool first) override;
  void average(const std::vector<Share>& shares, double decay, const at::Tensor& out) override {
    averageInto(shares, decay, out);
  }
  void averageInPlace(const std::vector<Share>& shares, double decay) override {
    for (const Share& share : shares) {
      left_out_ += std::isfinite(share.weight) ? 0 : 1;
    }
    const at::Tensor bad = averageInto(shares, decay, running());
    if (bad.defined()) {
      left_out_there_ = left_out_there_.defined() ? left_out_there_ + bad : bad;
    }
  }

 private:
  static at::Tensor trianglesOf(const at::Tensor& packed, const FactorLayout& layout) {
    return packed.view({layout.count, layout.triangle()});
  }
  CallSize addGradients(const KfacLayerSpec& spec, const at::Tensor& gradient, const at::Tensor& to, bool first) const;
  void addPatches(const KfacLayerSpec& spec, const at::Tensor& input, const at::Tensor& to, bool first) const;
  at::Tensor averageInto(const std::vector<Share>& shares, double decay, const at::Tensor& out) const;

  std::vector<at::Tensor> diagonals_;  // [factor] places in it
  std::int64_t left_out_ = 0;
  at::Tensor left_out_there_;  // the same, counted on the device
};

FactorAccumulator::CallSize AtenAccumulator::addGradients(const KfacLayerSpec& spec, const at::Tensor& gradient,
                                                          const at::Tensor& to, bool first) const {
  if (spec.kind != Kind::kConvolution) {
    const at::Tensor rows = sampleRows(gradient, type(), spec.reduce_sequence, /*mean=*/false);
    if (rows.numel() > 0) {
      operators::packedGram(to, rows.reshape({1, -1, rows.size(-1)}), false, false, !first);
    }
    return {rows.numel() / std::max<std::int64_t>(rows.size(-1), 1), samplesOf(rows)};
  }
  const bool batched = gradient.dim() == static_cast<std::int64_t>(spec.stride.size()) + 2;
  const at::Tensor images = (batched ? gradient : gradient.unsqueeze(0)).to(type());
  const std::int64_t samples = images.size(0);
  const std::int64_t rows = samples == 0 ? 0 : images.numel() / images.size(1);
  if (rows > 0) {
    const at::Tensor columns = images.reshape({samples, spec.groups, spec.outputs(), -1}).permute({1, 2, 0, 3});
    operators::packedGram(to, columns.reshape({spec.groups, spec.outputs(), rows}), true, false, !first);
  }
  return {rows, samples};
}

void AtenAccumulator::addPatches(const KfacLayerSpec& spec, const at::Tensor& input, const at::Tensor& to,
                                 bool first) const {
  const at::Tensor images = paddedImages(spec, input, type());
  const std::int64_t samples = images.size(0);
  const std::int64_t places = spec.inputs() / (images.size(1) / spec.groups);
  const auto bytes = static_cast<std::int64_t>(images.nbytes()) / samples * places;  // a stride makes them fewer
  const std::int64_t at_a_time = std::clamp<std::int64_t>(kLargestPatches / bytes, 1, samples);
  for (std::int64_t begin = 0; begin < samples; begin += at_a_time) {
    const at::Tensor some = images.narrow(0, begin, std::min(at_a_time, samples - begin));
    operators::packedGram(to, patchesOf(spec, some), true, spec.bias.has_value(), !first || begin > 0);
  }
}

FactorAccumulator::CallSize AtenAccumulator::addProducts(const KfacLayerSpec& spec, const FactorLayout& output_layout,
                                                         const FactorLayout& input_layout, const at::Tensor& input,
                                                         const at::Tensor& gradient, bool first) {
  const at::Tensor of_outputs = trianglesOf(slice(sums(), output_layout), output_layout);
  const CallSize size = addGradients(spec, gradient, of_outputs, first);
  if (size.rows == 0) {
    return size;
  }
  const at::Tensor of_inputs = slice(sums(), input_layout);
  if (spec.kind == Kind::kEmbedding) {
    const at::Tensor tokens = input.to(at::kLong).flatten();
    if (first) {
      of_inputs.zero_();
    }
    of_inputs.scatter_add_(0, tokens, tokens.ne(spec.padding_idx).to(type()));
  } else if (spec.kind == Kind::kConvolution) {
    addPatches(spec, input, trianglesOf(of_inputs, input_layout), first);
  } else {
    const at::Tensor rows = sampleRows(input, type(), spec.reduce_sequence, /*mean=*/true);
    operators::packedGram(trianglesOf(of_inputs, input_layout), rows.reshape({1, -1, rows.size(-1)}), false,
                          spec.bias.has_value(), !first);
  }
  return size;
}

// Returns how many sums were not finite, on the device; undefined: there was nothing to do.
at::Tensor AtenAccumulator::averageInto(const std::vector<Share>& shares, double decay, const at::Tensor& out) const {
  std::vector<at::Tensor> sum;
  std::vector<at::Tensor> old;
  std::vector<at::Tensor> to;
  std::vector<at::Scalar> weights;
  for (const Share& share : shares) {
    if (std::isfinite(share.weight)) {
      sum.push_back(slice(sums(), *share.layout));
      old.push_back(slice(running(), *share.layout));
      to.push_back(slice(out, *share.layout));
      weights.emplace_back(share.weight);
    } else if (!out.is_same(running())) {
      slice(out, *share.layout).copy_(slice(running(), *share.layout));
    }
  }
  if (sum.empty()) {
    return {};
  }
  const at::Tensor finite = at::stack(at::_foreach_norm(sum, std::numeric_limits<double>::infinity())).isfinite();
  const std::vector<at::Tensor> made = at::_foreach_mul(old, at::Scalar(decay));
  at::_foreach_add_(made, at::_foreach_mul(sum, weights));
  for (std::size_t i = 0; i < made.size(); ++i) {
    at::where_out(to[i], finite.select(0, static_cast<std::int64_t>(i)), made[i], old[i]);
  }
  return finite.logical_not().sum();
}

}  // namespace

std::unique_ptr<FactorAccumulator> makeAtenAccumulator(const std::vector<KfacLayerSpec>& layers,
                                                       const at::TensorOptions& options, FactorScaling scaling) {
  return std::make_unique<AtenAccumulator>(layers, options, scaling);
}

}  // namespace torchext
