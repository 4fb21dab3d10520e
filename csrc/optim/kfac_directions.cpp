#include "optim/kfac_directions.h"

#include <algorithm>

#include "optim/matrix_product.h"
#include "optim/reductions.h"

namespace torchext {
namespace {

using Kind = KfacLayerSpec::Kind;

// The gradient as [outputs, inputs], in the type of the buffers.
template <class T>
at::Tensor weightGradient(const KfacLayerSpec& spec) {
  return spec.weight.grad().to(c10::CppTypeToScalarType<T>::value).contiguous();
}

}  // namespace

KfacDirections::KfacDirections(const std::vector<KfacLayerSpec>& layers, at::ScalarType type,
                               const std::vector<int>& order, std::vector<int> parts)
    : layers_(layers), parts_(std::move(parts)), offsets_(layers.size(), 0), active_(layers.size(), false) {
  std::int64_t total = 0;
  int most = 1;
  places_.resize(layers.size());
  for (std::size_t layer = 0; layer < layers.size(); ++layer) {
    offsets_[layer] = total;
    total += size(static_cast<int>(layer));
    places_[layer].resize(static_cast<std::size_t>(parts_[layer]));
    most = std::max(most, parts_[layer]);
  }
  std::int64_t place = 0;
  const auto put = [&](int layer, int part) {
    places_[static_cast<std::size_t>(layer)][static_cast<std::size_t>(part)] = place;
    place += rows(layer) * (column(layer, part + 1) - column(layer, part));
  };
  for (const int layer : order) {
    if (this->parts(layer) == 1) {
      put(layer, 0);
    }
  }
  split_ends_.push_back(place);
  for (int part = 0; part < most; ++part) {
    for (const int layer : order) {
      if (this->parts(layer) > 1) {
        put(layer, part);
      }
    }
    split_ends_.push_back(place);
  }
  gradients_ = at::zeros({total}, type);
  directions_ = at::zeros({total}, type);
}

bool KfacDirections::splits(const KfacLayerSpec& spec, InverseForm form) {
  return form == InverseForm::kInverse && spec.kind != Kind::kEmbedding && spec.groups == 1;
}

std::int64_t KfacDirections::size(int layer) const {
  const KfacLayerSpec& spec = layers_[static_cast<std::size_t>(layer)];
  return spec.groups * spec.outputs() * spec.inputDim();
}

std::int64_t KfacDirections::rows(int layer) const {
  const KfacLayerSpec& spec = layers_[static_cast<std::size_t>(layer)];
  return spec.kind == Kind::kEmbedding ? spec.weight.size(0) : spec.groups * spec.outputs();
}

std::int64_t KfacDirections::column(int layer, int part) const {
  return size(layer) / rows(layer) * part / parts(layer);
}

at::Tensor KfacDirections::slice(int layer) const {
  return directions_.narrow(0, places_[static_cast<std::size_t>(layer)][0], size(layer));
}

at::Tensor KfacDirections::splitSlice(int part) const {
  const auto number = static_cast<std::size_t>(part);
  if (number + 1 >= split_ends_.size()) {
    return directions_.narrow(0, 0, 0);
  }
  return directions_.narrow(0, split_ends_[number], split_ends_[number + 1] - split_ends_[number]);
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

void KfacDirections::precondition(int layer, int part, const FactorInverse& inputs, const FactorInverse& outputs,
                                  InverseForm form, double damping) {
  if (gradients_.scalar_type() == at::kDouble) {
    preconditionTyped<double>(layer, part, inputs, outputs, form, damping);
  } else {
    preconditionTyped<float>(layer, part, inputs, outputs, form, damping);
  }
}

template <class T>
void KfacDirections::preconditionTyped(int layer, int part, const FactorInverse& inputs, const FactorInverse& outputs,
                                       InverseForm form, double damping) {
  const auto number = static_cast<std::size_t>(layer);
  const KfacLayerSpec& spec = layers_[number];
  const std::int64_t out = spec.outputs();
  const std::int64_t in = spec.inputDim();
  const T* gradient = gradients_.const_data_ptr<T>() + offsets_[number];
  T* direction = directions_.mutable_data_ptr<T>() + places_[number][static_cast<std::size_t>(part)];
  const std::int64_t begin = column(layer, part);
  const std::int64_t columns = column(layer, part + 1) - begin;
  if (!active_[number] || !inputs.defined() || !outputs.defined()) {
    const std::int64_t width = size(layer) / rows(layer);
    for (std::int64_t row = 0; row < rows(layer); ++row) {
      const T* from = gradient + row * width + begin;
      std::copy(from, from + columns, direction + row * columns);
    }
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
      multiply(false, false, out, columns, in, gradient, in, a + begin, in, T(0), work, columns);
      multiply(false, false, out, columns, out, g, out, work, columns, T(0), direction, columns);
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
      const int number = static_cast<int>(layer);
      sum += rates[layer] * rates[layer] *
             (gradients_.scalar_type() == at::kDouble ? productTyped<double>(number) : productTyped<float>(number));
    }
  }
  return sum;
}

template <class T>
double KfacDirections::productTyped(int layer) const {
  const auto number = static_cast<std::size_t>(layer);
  const std::int64_t width = size(layer) / rows(layer);
  double sum = 0;
  for (int part = 0; part < parts(layer); ++part) {
    const std::int64_t begin = column(layer, part);
    const std::int64_t columns = column(layer, part + 1) - begin;
    const T* gradient = gradients_.const_data_ptr<T>() + offsets_[number] + begin;
    const T* direction = directions_.const_data_ptr<T>() + places_[number][static_cast<std::size_t>(part)];
    if (columns == width) {
      sum += dotProduct(gradient, direction, size(layer));
      continue;
    }
    for (std::int64_t row = 0; row < rows(layer); ++row, gradient += width, direction += columns) {
      sum += dotProduct(gradient, direction, columns);
    }
  }
  return sum;
}

void KfacDirections::write(double factor) {
  for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
    if (!active_[layer]) {
      continue;
    }
    if (gradients_.scalar_type() == at::kDouble) {
      writeTyped(static_cast<int>(layer), factor);
    } else {
      writeTyped(static_cast<int>(layer), static_cast<float>(factor));
    }
  }
}

template <class T>
void KfacDirections::writeTyped(int layer, T factor) {
  const auto number = static_cast<std::size_t>(layer);
  const KfacLayerSpec& spec = layers_[number];
  const std::int64_t inputs = size(layer) / rows(layer) - (spec.bias ? 1 : 0);
  // A gradient of another memory layout or type takes its values through one that is as the buffers are.
  const auto plain = [](const at::Tensor& tensor) {
    return tensor.is_contiguous() && tensor.scalar_type() == c10::CppTypeToScalarType<T>::value
               ? tensor
               : at::empty(tensor.sizes(), c10::CppTypeToScalarType<T>::value);
  };
  const at::Tensor weight = plain(spec.weight.grad());
  const at::Tensor bias = spec.bias ? plain(spec.bias->grad()) : at::Tensor();
  for (int part = 0; part < parts(layer); ++part) {
    const T* direction = directions_.const_data_ptr<T>() + places_[number][static_cast<std::size_t>(part)];
    const std::int64_t begin = column(layer, part);
    const std::int64_t columns = column(layer, part + 1) - begin;
    const std::int64_t of_weight = std::min(columns, inputs - begin);
    T* to = weight.mutable_data_ptr<T>() + begin;
    for (std::int64_t row = 0; row < rows(layer); ++row, to += inputs, direction += columns) {
      for (std::int64_t i = 0; i < of_weight; ++i) {
        to[i] = factor * direction[i];
      }
      if (of_weight < columns) {
        bias.mutable_data_ptr<T>()[row] = factor * direction[of_weight];
      }
    }
  }
  const auto give_back = [](const at::Tensor& values, const at::Tensor& gradient) {
    if (!values.is_same(gradient)) {
      gradient.copy_(values);
    }
  };
  give_back(weight, spec.weight.grad());
  if (spec.bias) {
    give_back(bias, spec.bias->grad());
  }
}

}  // namespace torchext
