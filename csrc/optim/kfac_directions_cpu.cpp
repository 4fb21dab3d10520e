// KfacDirections on the CPU: loops over raw memory, and torch's BLAS.
#include <algorithm>
#include <cmath>

#include "optim/kfac_directions.h"
#include "optim/matrix_product.h"
#include "optim/reductions.h"

namespace torchext {
namespace {

using Kind = KfacLayerSpec::Kind;

template <class T>
class CpuDirections final : public KfacDirections {
 public:
  CpuDirections(const std::vector<KfacLayerSpec>& layers, Layout layout)
      : KfacDirections(layers, at::TensorOptions(kType), std::move(layout)) {}

  bool collect(double scale, const std::vector<at::Tensor>& others) override;
  void precondition(int layer, int part, const FactorInverse& inputs, const FactorInverse& outputs, InverseForm form,
                    double damping) override;
  void write(const std::vector<double>& rates, std::optional<double> kl_clip) override;
  double clip() const override { return clip_; }
  std::size_t bytes() const override { return KfacDirections::bytes() + work_.bytes(); }

 private:
  static constexpr at::ScalarType kType = c10::CppTypeToScalarType<T>::value;
  void collectLayer(int layer, T scale);
  double product(int layer) const;
  void writeLayer(int layer, T factor);
  const KfacLayerSpec& spec(int layer) const { return layers()[static_cast<std::size_t>(layer)]; }
  int count() const { return static_cast<int>(layers().size()); }
  const T* gradient(int layer) const { return gradients().template const_data_ptr<T>() + offset(layer); }
  const T* direction(int layer, int part) const {
    return directions().template const_data_ptr<T>() + place(layer, part);
  }

  Scratch work_;
  double clip_ = 1;
};

template <class T>
bool CpuDirections<T>::collect(double scale, const std::vector<at::Tensor>& others) {
  findActive();
  for (int layer = 0; layer < count(); ++layer) {
    collectLayer(layer, static_cast<T>(scale));
  }
  return allFinite(gradients().template const_data_ptr<T>(), gradients().numel()) &&
         std::all_of(others.begin(), others.end(), isFinite);
}

template <class T>
void CpuDirections<T>::collectLayer(int layer, T scale) {
  T* to = gradients().template mutable_data_ptr<T>() + offset(layer);
  const std::int64_t elements = size(layer);
  if (!active(layer)) {
    std::fill(to, to + elements, T(0));
    return;
  }
  const at::Tensor weight = spec(layer).weight.grad().to(kType).contiguous();
  const T* from = weight.const_data_ptr<T>();
  if (!spec(layer).bias) {
    for (std::int64_t i = 0; i < elements; ++i) {
      to[i] = scale * from[i];
    }
    return;
  }
  at::Tensor bias = biasGradient(layer);
  if (bias.defined()) {
    bias = bias.to(kType).contiguous();
  }
  const T* last = bias.defined() ? bias.const_data_ptr<T>() : nullptr;
  const std::int64_t inputs = spec(layer).inputs();
  for (std::int64_t row = 0; row < rows(layer); ++row, from += inputs, to += inputs + 1) {
    for (std::int64_t i = 0; i < inputs; ++i) {
      to[i] = scale * from[i];
    }
    to[inputs] = last != nullptr ? scale * last[row] : T(0);
  }
}

template <class T>
void CpuDirections<T>::precondition(int layer, int part, const FactorInverse& inputs, const FactorInverse& outputs,
                                    InverseForm form, double damping) {
  const std::int64_t out = spec(layer).outputs();
  const std::int64_t in = spec(layer).inputDim();
  const T* grad = gradient(layer);
  T* to = directions().template mutable_data_ptr<T>() + place(layer, part);
  const std::int64_t begin = column(layer, part);
  const std::int64_t columns = column(layer, part + 1) - begin;
  if (!active(layer) || !inputs.defined() || !outputs.defined()) {
    for (std::int64_t row = 0; row < rows(layer); ++row) {
      const T* from = grad + row * width(layer) + begin;
      std::copy(from, from + columns, to + row * columns);
    }
    return;
  }
  const auto lambda = static_cast<T>(damping);
  T* work = work_.get<T>(2 * out * in);
  T* second = work + out * in;
  const T* g = outputs.matrix.const_data_ptr<T>();
  const T* a = inputs.matrix.const_data_ptr<T>();
  if (spec(layer).kind == Kind::kEmbedding) {  // stored as [tokens, width], and A is diagonal
    if (form == InverseForm::kInverse) {
      multiply(false, false, in, out, out, grad, out, g, out, T(0), to, out);
      for (std::int64_t token = 0; token < in; ++token) {
        for (std::int64_t i = 0; i < out; ++i) {
          to[token * out + i] *= a[token];
        }
      }
      return;
    }
    const T* values = outputs.values.const_data_ptr<T>();
    multiply(false, false, in, out, out, grad, out, g, out, T(0), work, out);
    for (std::int64_t token = 0; token < in; ++token) {
      for (std::int64_t i = 0; i < out; ++i) {
        work[token * out + i] /= a[token] * values[i] + lambda;
      }
    }
    multiply(false, true, in, out, out, work, out, g, out, T(0), to, out);
    return;
  }
  for (std::int64_t group = 0; group < spec(layer).groups; ++group) {
    if (form == InverseForm::kInverse) {
      multiply(false, false, out, columns, in, grad, in, a + begin, in, T(0), work, columns);
      multiply(false, false, out, columns, out, g, out, work, columns, T(0), to, columns);
    } else {
      const T* g_values = outputs.values.const_data_ptr<T>() + group * out;
      const T* a_values = inputs.values.const_data_ptr<T>() + group * in;
      multiply(true, false, out, in, out, g, out, grad, in, T(0), work, in);
      multiply(false, false, out, in, in, work, in, a, in, T(0), second, in);
      for (std::int64_t i = 0; i < out; ++i) {
        for (std::int64_t j = 0; j < in; ++j) {
          second[i * in + j] /= g_values[i] * a_values[j] + lambda;
        }
      }
      multiply(false, true, out, in, in, second, in, a, in, T(0), work, in);
      multiply(false, false, out, in, out, g, out, work, in, T(0), to, in);
    }
    grad += out * in;
    to += out * in;
    g += out * out;
    a += in * in;
  }
}

template <class T>
double CpuDirections<T>::product(int layer) const {
  double sum = 0;
  for (int part = 0; part < parts(layer); ++part) {
    const std::int64_t begin = column(layer, part);
    const std::int64_t columns = column(layer, part + 1) - begin;
    const T* grad = gradient(layer) + begin;
    const T* found = direction(layer, part);
    if (columns == width(layer)) {
      sum += dotProduct(grad, found, size(layer));
      continue;
    }
    for (std::int64_t row = 0; row < rows(layer); ++row, grad += width(layer), found += columns) {
      sum += dotProduct(grad, found, columns);
    }
  }
  return sum;
}

template <class T>
void CpuDirections<T>::write(const std::vector<double>& rates, std::optional<double> kl_clip) {
  clip_ = 1;
  if (kl_clip) {
    double sum = 0;
    for (int layer = 0; layer < count(); ++layer) {
      const double rate = rates[static_cast<std::size_t>(layer)];
      sum += active(layer) ? rate * rate * product(layer) : 0;
    }
    clip_ = std::abs(sum) > 0 ? std::min(1.0, std::sqrt(*kl_clip / std::abs(sum))) : 1.0;
  }
  for (int layer = 0; layer < count(); ++layer) {
    if (active(layer)) {
      writeLayer(layer, static_cast<T>(clip_));
    }
  }
}

template <class T>
void CpuDirections<T>::writeLayer(int layer, T factor) {
  const KfacLayerSpec& of = spec(layer);
  const std::int64_t inputs = width(layer) - (of.bias ? 1 : 0);
  // A gradient of another memory layout or type takes its values through one that is as the buffers are.
  const auto plain = [](const at::Tensor& tensor) {
    return tensor.is_contiguous() && tensor.scalar_type() == kType ? tensor : at::empty(tensor.sizes(), kType);
  };
  const at::Tensor weight = plain(of.weight.grad());
  const at::Tensor bias_gradient = biasGradient(layer);
  const at::Tensor bias = bias_gradient.defined() ? plain(bias_gradient) : at::Tensor();
  for (int part = 0; part < parts(layer); ++part) {
    const T* from = direction(layer, part);
    const std::int64_t begin = column(layer, part);
    const std::int64_t columns = column(layer, part + 1) - begin;
    const std::int64_t of_weight = std::min(columns, inputs - begin);
    T* to = weight.mutable_data_ptr<T>() + begin;
    for (std::int64_t row = 0; row < rows(layer); ++row, to += inputs, from += columns) {
      for (std::int64_t i = 0; i < of_weight; ++i) {
        to[i] = factor * from[i];
      }
      if (of_weight < columns && bias.defined()) {
        bias.mutable_data_ptr<T>()[row] = factor * from[of_weight];
      }
    }
  }
  const auto give_back = [](const at::Tensor& values, const at::Tensor& gradient) {
    if (!values.is_same(gradient)) {
      gradient.copy_(values);
    }
  };
  give_back(weight, of.weight.grad());
  if (bias.defined()) {
    give_back(bias, bias_gradient);
  }
}

}  // namespace

std::unique_ptr<KfacDirections> makeCpuDirections(const std::vector<KfacLayerSpec>& layers, at::ScalarType type,
                                                  KfacDirections::Layout layout) {
  if (type == at::kDouble) {
    return std::make_unique<CpuDirections<double>>(layers, std::move(layout));
  }
  return std::make_unique<CpuDirections<float>>(layers, std::move(layout));
}

}  // namespace torchext
