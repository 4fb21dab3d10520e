#include "optim/kfac_statistics.h"

#include <cmath>

#include "core/packed_triangle.h"
#include "optim/matrix_product.h"
#include "optim/patch_correlation.h"

namespace torchext {
namespace {

std::size_t unsignedOf(std::int64_t value) { return static_cast<std::size_t>(value); }

template <class T>
void addTriangleOf(const T* full, std::int64_t dim, bool first, T* sums) {
  if (first) {
    core::packTriangle(full, unsignedOf(dim), unsignedOf(dim), sums);
  } else {
    core::addTriangle(full, unsignedOf(dim), unsignedOf(dim), T(1), sums);
  }
}

}  // namespace

KfacStatistics::KfacStatistics(const std::vector<KfacLayerSpec>& layers, at::ScalarType type, FactorScaling scaling)
    : layers_(layers), type_(type), scaling_(scaling), first_slot_(layers.size()), steps_(layers.size()) {
  std::int64_t offset = 0;
  const auto place = [&](FactorSlot slot) {
    slot.offset = offset;
    const auto dim = unsignedOf(slot.dim);
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
  running_ = at::zeros({offset}, type);
  sums_ = at::zeros({offset}, type);
  for (const FactorSlot& slot : slots_) {
    const at::Tensor own = slice(running_, slot);
    if (slot.diagonal) {
      own.fill_(1);
      continue;
    }
    for (std::int64_t group = 0; group < slot.count; ++group) {
      for (std::size_t i = 0; i < unsignedOf(slot.dim); ++i) {
        const auto row = static_cast<std::int64_t>(core::packedRow(i, unsignedOf(slot.dim)));
        own.select(0, group * slot.triangle() + row).fill_(1);
      }
    }
  }
}

void KfacStatistics::add(int layer, const at::Tensor& input, const at::Tensor& gradient, int backward_pass) {
  if (type_ == at::kDouble) {
    addTyped<double>(layer, input, gradient, backward_pass);
  } else {
    addTyped<float>(layer, input, gradient, backward_pass);
  }
}

template <class T>
void KfacStatistics::addTyped(int layer, const at::Tensor& input, const at::Tensor& gradient, int backward_pass) {
  const auto number = static_cast<std::size_t>(layer);
  const KfacLayerSpec& spec = layers_[number];
  const FactorSlot& output_slot = slots_[first_slot_[number]];
  const FactorSlot& input_slot = slots_[first_slot_[number] + 1];
  LayerStep& step = steps_[number];
  const auto gradients = gradientMatrix<T>(spec, gradient, samples_);
  if (gradients.count == 0) {
    return;  // an empty batch says nothing
  }
  const bool first = step.calls == 0;
  addProduct(output_slot, gradients, first);
  if (spec.kind == KfacLayerSpec::Kind::kEmbedding) {
    T* counts = sums_.mutable_data_ptr<T>() + input_slot.offset;
    if (first) {
      std::fill(counts, counts + input_slot.size, T(0));
    }
    const at::Tensor tokens = input.to(at::kLong).contiguous();
    const auto* token = tokens.const_data_ptr<std::int64_t>();
    for (std::int64_t i = 0; i < tokens.numel(); ++i) {
      if (token[i] != spec.padding_idx) {
        counts[token[i]] += T(1);
      }
    }
  } else if (patchCorrelationPays(spec, input)) {
    T* full = product_.get<T>(input_slot.dim * input_slot.dim);
    correlatePatches<T>(spec, input, samples_, full);
    addTriangleOf(full, input_slot.dim, first, sums_.mutable_data_ptr<T>() + input_slot.offset);
  } else {
    addProduct(input_slot, inputMatrix<T>(spec, input, samples_), first);
  }
  ++step.calls;
  step.rows += gradients.count;
  if (backward_pass != step.backward_pass) {
    step.samples += gradients.samples;
    step.backward_pass = backward_pass;
  }
}

template <class T>
void KfacStatistics::addProduct(const FactorSlot& slot, const SampleMatrix<T>& matrix, bool first) {
  const std::int64_t dim = slot.dim;
  T* full = product_.get<T>(dim * dim);
  T* sums = sums_.mutable_data_ptr<T>() + slot.offset;
  for (std::int64_t group = 0; group < slot.count; ++group, sums += slot.triangle()) {
    // By samples, the 1 of the bias is not in the matrix: its products are sums over the samples.
    const std::int64_t inner = matrix.dim < dim ? matrix.dim : dim;
    if (matrix.by_dimension) {
      symmetricProduct(matrix.data + group * dim * matrix.count, matrix.count, true, dim, matrix.count, full, dim);
    } else {
      symmetricProduct(matrix.data, matrix.dim, false, inner, matrix.count, full, dim);
    }
    if (inner < dim) {
      T* ones = full + inner * dim;  // the last row, then its copy in the last column
      std::fill(ones, ones + inner, T(0));
      for (std::int64_t sample = 0; sample < matrix.count; ++sample) {
        const T* row = matrix.data + sample * inner;
        for (std::int64_t i = 0; i < inner; ++i) {
          ones[i] += row[i];
        }
      }
      for (std::int64_t i = 0; i < inner; ++i) {
        full[i * dim + inner] = ones[i];
      }
      ones[inner] = static_cast<T>(matrix.count);
    }
    addTriangleOf(full, dim, first, sums);
  }
}

double KfacStatistics::coefficient(const FactorSlot& slot, double loss_scale) const {
  const auto layer = static_cast<std::size_t>(slot.layer);
  const auto samples = static_cast<double>(steps_[layer].samples);
  const auto rows = static_cast<double>(steps_[layer].rows);
  const double unscaled = slot.input_side ? 1.0 : 1.0 / (loss_scale * loss_scale);
  if (scaling_ == FactorScaling::kKfc) {
    return slot.input_side ? 1 / samples : unscaled * samples * samples / rows;
  }
  const bool convolution = layers_[layer].kind == KfacLayerSpec::Kind::kConvolution;
  const double positions = convolution ? rows / samples : 1.0;
  return unscaled / (rows * positions * positions);
}

template <class T>
bool KfacStatistics::mergeInto(const FactorSlot& slot, double decay, double loss_scale, T* out) const {
  const T* running = running_.const_data_ptr<T>() + slot.offset;
  const T* sums = sums_.const_data_ptr<T>() + slot.offset;
  const double weight = (1 - decay) * coefficient(slot, loss_scale);
  T trace = 0;
  for (std::int64_t group = 0; group < slot.count && !slot.diagonal; ++group) {
    trace += core::packedTrace(sums + group * slot.triangle(), unsignedOf(slot.dim));
  }
  if (!std::isfinite(trace) || !std::isfinite(weight)) {
    if (out != running) {
      std::copy(running, running + slot.size, out);
    }
    return false;
  }
  const auto keep = static_cast<T>(decay);
  const auto take = static_cast<T>(weight);
  for (std::int64_t i = 0; i < slot.size; ++i) {
    out[i] = keep * running[i] + take * sums[i];
  }
  return true;
}

bool KfacStatistics::preview(const FactorSlot& slot, double decay, double loss_scale, const at::Tensor& out) const {
  return type_ == at::kDouble ? mergeInto(slot, decay, loss_scale, out.mutable_data_ptr<double>() + slot.offset)
                              : mergeInto(slot, decay, loss_scale, out.mutable_data_ptr<float>() + slot.offset);
}

int KfacStatistics::merge(double decay, double loss_scale) {
  int left_out = 0;
  for (const FactorSlot& slot : slots_) {
    if (steps_[static_cast<std::size_t>(slot.layer)].calls > 0) {
      left_out += preview(slot, decay, loss_scale, running_) ? 0 : 1;
    }
  }
  discard();
  return left_out;
}

void KfacStatistics::discard() {
  for (LayerStep& step : steps_) {
    step = {};
  }
}

std::size_t KfacStatistics::bytes() const {
  return running_.nbytes() + sums_.nbytes() + samples_.bytes() + product_.bytes();
}

}  // namespace torchext
