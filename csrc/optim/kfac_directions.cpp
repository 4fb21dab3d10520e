#include "optim/kfac_directions.h"

#include <bit>
#include <cstdint>

#include "optim/matrix_product.h"

namespace torchext {
namespace {

using Kind = KfacLayerSpec::Kind;

// By the bits of the exponent: a sum would not be vectorised, as its order must be kept.
template <class T>
bool allFinite(const T* data, std::int64_t count) {
  using Bits = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;
  constexpr Bits kExponent = sizeof(T) == 4 ? Bits(0x7f800000U) : Bits(0x7ff0000000000000ULL);
  Bits found = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    found |= static_cast<Bits>((std::bit_cast<Bits>(data[i]) & kExponent) == kExponent);
  }
  return found == 0;
}

// The gradient as [outputs, inputs], in the type of the buffers.
template <class T>
at::Tensor weightGradient(const KfacLayerSpec& spec) {
  return spec.weight.grad().to(c10::CppTypeToScalarType<T>::value).contiguous();
}

}  // namespace

bool isFinite(const at::Tensor& tensor) {
  if (tensor.is_contiguous() && tensor.scalar_type() == at::kFloat) {
    return allFinite(tensor.const_data_ptr<float>(), tensor.numel());
  }
  if (tensor.is_contiguous() && tensor.scalar_type() == at::kDouble) {
    return allFinite(tensor.const_data_ptr<double>(), tensor.numel());
  }
  const at::Tensor values = tensor.layout() == at::kStrided ? tensor : tensor._values();
  return at::isfinite(values).all().item<bool>();
}

KfacDirections::KfacDirections(const std::vector<KfacLayerSpec>& layers, at::ScalarType type,
                               const std::vector<int>& order)
    : layers_(layers), offsets_(layers.size(), 0), active_(layers.size(), false) {
  std::int64_t total = 0;
  for (const int layer : order) {
    offsets_[static_cast<std::size_t>(layer)] = total;
    total += size(layer);
  }
  gradients_ = at::zeros({total}, type);
  directions_ = at::zeros({total}, type);
}

std::int64_t KfacDirections::size(int layer) const {
  const KfacLayerSpec& spec = layers_[static_cast<std::size_t>(layer)];
  return spec.groups * spec.outputs() * spec.inputDim();
}

at::Tensor KfacDirections::slice(int layer) const {
  return directions_.narrow(0, offsets_[static_cast<std::size_t>(layer)], size(layer));
}

bool KfacDirections::collect(double scale) {
  return gradients_.scalar_type() == at::kDouble ? collectTyped<double>(scale) : collectTyped<float>(scale);
}

template <class T>
bool KfacDirections::collectTyped(double scale) {
  const auto factor = static_cast<T>(scale);
  for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
    const KfacLayerSpec& spec = layers_[layer];
    T* to = gradients_.mutable_data_ptr<T>() + offsets_[layer];
    const std::int64_t count = size(static_cast<int>(layer));
    active_[layer] = spec.weight.grad().defined() && (!spec.bias || spec.bias->grad().defined());
    if (!active_[layer]) {
      std::fill(to, to + count, T(0));
      continue;
    }
    const at::Tensor weight = weightGradient<T>(spec);
    const T* from = weight.const_data_ptr<T>();
    if (!spec.bias) {
      for (std::int64_t i = 0; i < count; ++i) {
        to[i] = factor * from[i];
      }
      continue;
    }
    const at::Tensor bias = spec.bias->grad().to(weight.scalar_type()).contiguous();
    const T* last = bias.const_data_ptr<T>();
    const std::int64_t inputs = spec.inputs();
    for (std::int64_t row = 0; row < bias.numel(); ++row, from += inputs, to += inputs + 1) {
      for (std::int64_t i = 0; i < inputs; ++i) {
        to[i] = factor * from[i];
      }
      to[inputs] = factor * last[row];
    }
  }
  return allFinite(gradients_.const_data_ptr<T>(), gradients_.numel());
}

void KfacDirections::precondition(int layer, const FactorInverse& inputs, const FactorInverse& outputs,
                                  InverseForm form, double damping) {
  if (gradients_.scalar_type() == at::kDouble) {
    preconditionTyped<double>(layer, inputs, outputs, form, damping);
  } else {
    preconditionTyped<float>(layer, inputs, outputs, form, damping);
  }
}

template <class T>
void KfacDirections::preconditionTyped(int layer, const FactorInverse& inputs, const FactorInverse& outputs,
                                       InverseForm form, double damping) {
  const auto number = static_cast<std::size_t>(layer);
  const KfacLayerSpec& spec = layers_[number];
  const std::int64_t out = spec.outputs();
  const std::int64_t in = spec.inputDim();
  const T* gradient = gradients_.const_data_ptr<T>() + offsets_[number];
  T* direction = directions_.mutable_data_ptr<T>() + offsets_[number];
  if (!active_[number] || !inputs.defined() || !outputs.defined()) {
    std::copy(gradient, gradient + size(layer), direction);
    return;
  }
  const auto lambda = static_cast<T>(damping);
  T* work = work_.get<T>(2 * out * in);
  T* second = work + out * in;
  const T* g = outputs.matrix.const_data_ptr<T>();
  const T* a = inputs.matrix.const_data_ptr<T>();
  if (spec.kind == Kind::kEmbedding) {  // stored as [tokens, width], and A is diagonal
    if (form == InverseForm::kInverse) {
      multiply(false, false, in, out, out, gradient, out, g, out, T(0), direction, out);
      for (std::int64_t token = 0; token < in; ++token) {
        for (std::int64_t i = 0; i < out; ++i) {
          direction[token * out + i] *= a[token];
        }
      }
      return;
    }
    const T* values = outputs.values.const_data_ptr<T>();
    multiply(false, false, in, out, out, gradient, out, g, out, T(0), work, out);
    for (std::int64_t token = 0; token < in; ++token) {
      for (std::int64_t i = 0; i < out; ++i) {
        work[token * out + i] /= a[token] * values[i] + lambda;
      }
    }
    multiply(false, true, in, out, out, work, out, g, out, T(0), direction, out);
    return;
  }
  for (std::int64_t group = 0; group < spec.groups; ++group) {
    if (form == InverseForm::kInverse) {
      multiply(false, false, out, in, in, gradient, in, a, in, T(0), work, in);
      multiply(false, false, out, in, out, g, out, work, in, T(0), direction, in);
    } else {
      const T* g_values = outputs.values.const_data_ptr<T>() + group * out;
      const T* a_values = inputs.values.const_data_ptr<T>() + group * in;
      multiply(true, false, out, in, out, g, out, gradient, in, T(0), work, in);
      multiply(false, false, out, in, in, work, in, a, in, T(0), second, in);
      for (std::int64_t i = 0; i < out; ++i) {
        for (std::int64_t j = 0; j < in; ++j) {
          second[i * in + j] /= g_values[i] * a_values[j] + lambda;
        }
      }
      multiply(false, true, out, in, in, second, in, a, in, T(0), work, in);
      multiply(false, false, out, in, out, g, out, work, in, T(0), direction, in);
    }
    gradient += out * in;
    direction += out * in;
    g += out * out;
    a += in * in;
  }
}

double KfacDirections::product(const std::vector<double>& rates) const {
  double sum = 0;
  for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
    if (active_[layer]) {
      const std::int64_t count = size(static_cast<int>(layer));
      const double dot =
          at::dot(gradients_.narrow(0, offsets_[layer], count), directions_.narrow(0, offsets_[layer], count))
              .item<double>();
      sum += rates[layer] * rates[layer] * dot;
    }
  }
  return sum;
}

void KfacDirections::write(double factor) {
  for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
    if (!active_[layer]) {
      continue;
    }
    const KfacLayerSpec& spec = layers_[layer];
    const std::int64_t rows = spec.kind == Kind::kEmbedding ? spec.weight.size(0) : spec.groups * spec.outputs();
    const at::Tensor direction = slice(static_cast<int>(layer));
    const std::int64_t columns = direction.numel() / rows;
    if (factor != 1) {
      direction.mul_(factor);
    }
    const at::Tensor matrix = direction.view({rows, columns});
    at::Tensor weight = spec.weight.mutable_grad();
    if (!spec.bias) {
      weight.copy_(direction.view(weight.sizes()));
      continue;
    }
    const at::Tensor inner = matrix.narrow(1, 0, columns - 1);
    if (weight.is_contiguous()) {
      weight.view({rows, columns - 1}).copy_(inner);
    } else {
      weight.copy_(inner.reshape(weight.sizes()));
    }
    spec.bias->mutable_grad().copy_(matrix.select(1, columns - 1));
  }
}

}  // namespace torchext
