// Preconditioner on the CPU: loops over raw memory, and torch's BLAS or the processor's matrix tiles.
#include <algorithm>
#include <cmath>

#include "kernels/cpu/scale.h"
#include "kfac/linalg/matrix_product.h"
#include "kfac/linalg/reductions.h"
#include "kfac/linalg/storage_swap.h"
#include "kfac/precondition/kl_clip.h"
#include "kfac/precondition/kronecker_product.h"
#include "kfac/precondition/preconditioner.h"
#include "kfac/precondition/tiled_product.h"

namespace torchext {
namespace {

using Kind = KfacLayerSpec::Kind;

template <class T>
class CpuPreconditioner final : public Preconditioner {
 public:
  CpuPreconditioner(const std::vector<KfacLayerSpec>& layers, Layout layout)
      : Preconditioner(layers, at::TensorOptions(kType), layout), tiles_(layout.tiles), tiled_(layers.size()) {
    for (auto& tiled : tiled_) {
      tiled = std::make_shared<TiledProduct>();
    }
  }

  bool collect(double scale, const std::vector<at::Tensor>& others, const std::vector<bool>& of_rows) override;
  void precondition(int layer, int part, const FactorInverse& inputs, const FactorInverse& outputs, InverseForm form,
                    double damping) override;
  std::optional<double> takeRows(int layer, const PerSampleProduct& made, double expected) override;
  void takeWritten(int layer, const WrittenGradient& written) override {
    sources_[static_cast<std::size_t>(layer)].written = written;
  }
  std::shared_ptr<TiledProduct> tiled(int layer) override {
    const bool used = tiles_ && usesTiles(spec(layer), InverseForm::kInverse);
    return used ? tiled_[static_cast<std::size_t>(layer)] : nullptr;
  }
  std::int64_t write(const std::vector<double>& rates, std::optional<double> kl_clip) override;
  double clip() const override { return clip_; }
  std::size_t bytes() const override;

 private:
  static constexpr at::ScalarType kType = c10::CppTypeToScalarType<T>::value;
  // What a step reads of a layer: .grad itself where it is of this type, dense and not to be scaled, else its copy in
  // the flat buffer, the bias behind the weight. Held from collect() to the end of the step.
  struct Source {
    at::Tensor weight;  // undefined: the copy
    at::Tensor bias;
    const T* weight_data = nullptr;
    const T* bias_data = nullptr;
    std::vector<double> times_signs;   // of layers that may be of rows
    std::optional<double> row_factor;  // none: V is in the buffer
    PerSampleProduct rows;
    WrittenGradient written;
  };
  // Columns of a part, which lie as a matrix of those of the weight and, behind it, that of the bias.
  struct Columns {
    std::int64_t begin = 0;
    std::int64_t of_weight = 0;
    bool bias = false;
  };
  bool collectLayer(int layer, T scale, bool compared);
  void preconditionOnTiles(int layer, int part, const FactorInverse& inputs, const FactorInverse& outputs);
  void preconditionEmbedding(int layer, const FactorInverse& inputs, const FactorInverse& outputs, InverseForm form,
                             T lambda);
  double product(int layer) const;
  void writeLayer(int layer, double factor);
  bool writeAhead(int layer, double factor);
  void forgetSources() { sources_.assign(static_cast<std::size_t>(count()), Source()); }
  const Source& source(int layer) const { return sources_[static_cast<std::size_t>(layer)]; }
  std::int64_t inputs(int layer) const { return spec(layer).width() - (spec(layer).bias ? 1 : 0); }
  Columns columns(int layer, int part) const {
    const std::int64_t begin = column(layer, part);
    const std::int64_t end = column(layer, part + 1);
    return {begin, std::min(end, inputs(layer)) - begin, end > inputs(layer)};
  }
  const T* direction(int layer, int part) const {
    return preconditioned().template const_data_ptr<T>() + place(layer, part);
  }

  std::vector<Source> sources_;  // [layer]
  Scratch work_;
  bool tiles_;
  std::vector<std::shared_ptr<TiledProduct>> tiled_;  // [layer], of the part that this rank computes
  TiledProduct::Work tiled_work_;
  double scale_ = 1;  // of the last collect()
  double clip_ = 1;
};

template <class T>
std::size_t CpuPreconditioner<T>::bytes() const {
  std::size_t bytes = Preconditioner::bytes() + work_.bytes() + tiled_work_.bytes();
  for (const auto& tiled : tiled_) {
    bytes += tiled->bytes();
  }
  return bytes;
}

template <class T>
bool CpuPreconditioner<T>::collect(double scale, const std::vector<at::Tensor>& others,
                                   const std::vector<bool>& of_rows) {
  findActive();
  forgetSources();
  scale_ = scale;
  bool finite = true;
  for (int layer = 0; layer < count() && finite; ++layer) {
    const bool compared = !of_rows.empty() && of_rows[static_cast<std::size_t>(layer)];
    finite = collectLayer(layer, static_cast<T>(scale), compared);
  }
  finite = finite && std::all_of(others.begin(), others.end(), isFinite);
  if (!finite) {
    forgetSources();
  }
  return finite;
}

template <class T>
bool CpuPreconditioner<T>::collectLayer(int layer, T scale, bool compared) {
  Source& from = sources_[static_cast<std::size_t>(layer)];
  T* copy = gradients().template mutable_data_ptr<T>() + offset(layer);
  const std::int64_t of_weight = spec(layer).rows() * inputs(layer);
  const auto take = [&](const at::Tensor& gradient, std::int64_t elements, T* to, at::Tensor& held) -> const T* {
    if (!gradient.defined()) {
      std::fill(to, to + elements, T(0));
      return to;
    }
    const at::Tensor dense = gradient.to(kType).contiguous();
    const T* data = dense.const_data_ptr<T>();
    if (scale == T(1) && dense.is_same(gradient)) {
      held = gradient;
      return data;
    }
    cpu::scaleInto(to, data, static_cast<std::size_t>(elements), scale);
    return to;
  };
  from.weight_data = take(spec(layer).weight.grad(), of_weight, copy, from.weight);
  bool finite = false;
  if (compared) {  // of memory read once: what is not finite stays so in a sum
    from.times_signs = timesSigns(from.weight_data, spec(layer).rows(), inputs(layer));
    finite =
        std::all_of(from.times_signs.begin(), from.times_signs.end(), [](double sum) { return std::isfinite(sum); });
  }
  finite = finite || allFinite(from.weight_data, of_weight);
  if (spec(layer).bias) {
    from.bias_data =
        take(active(layer) ? biasGradient(layer) : at::Tensor(), spec(layer).rows(), copy + of_weight, from.bias);
    finite = finite && allFinite(from.bias_data, spec(layer).rows());
  }
  return finite;
}

template <class T>
void CpuPreconditioner<T>::precondition(int layer, int part, const FactorInverse& inverse_of_inputs,
                                        const FactorInverse& inverse_of_outputs, InverseForm form, double damping) {
  const std::int64_t in = inputs(layer);
  const Columns columns = this->columns(layer, part);
  const T* grad = source(layer).weight_data;
  const T* bias = source(layer).bias_data;
  T* to = preconditioned().template mutable_data_ptr<T>() + place(layer, part);
  const std::int64_t rows = spec(layer).rows();
  T* to_bias = to + rows * columns.of_weight;
  if (!active(layer) || !inverse_of_inputs.defined() || !inverse_of_outputs.defined()) {
    for (std::int64_t row = 0; row < rows; ++row) {
      to = std::copy_n(grad + row * in + columns.begin, columns.of_weight, to);
    }
    if (columns.bias) {
      std::copy_n(bias, rows, to_bias);
    }
    return;
  }
  if (spec(layer).kind == Kind::kEmbedding) {
    preconditionEmbedding(layer, inverse_of_inputs, inverse_of_outputs, form, static_cast<T>(damping));
    return;
  }
  if (tiles_ && usesTiles(spec(layer), form)) {
    preconditionOnTiles(layer, part, inverse_of_inputs, inverse_of_outputs);
    return;
  }
  KroneckerProduct<T> group{.out = spec(layer).outputs(),
                            .in = in,
                            .dim = spec(layer).inputDim(),
                            .begin = columns.begin,
                            .of_weight = columns.of_weight,
                            .count = columns.of_weight + (columns.bias ? 1 : 0),
                            .gradient = grad,
                            .bias = bias,
                            .of_outputs = inverse_of_outputs.matrix.template const_data_ptr<T>(),
                            .of_inputs = inverse_of_inputs.matrix.template const_data_ptr<T>(),
                            .to = to,
                            .to_bias = to_bias};
  T* work = work_.get<T>(2 * group.out * group.dim);
  for (std::int64_t number = 0; number < spec(layer).groups; ++number) {
    if (form == InverseForm::kInverse) {
      group.makeOfInverses(work);
    } else {
      group.makeOfEigenvectors(inverse_of_outputs.values.template const_data_ptr<T>() + number * group.out,
                               inverse_of_inputs.values.template const_data_ptr<T>() + number * group.dim,
                               static_cast<T>(damping), work);
    }
    group.goOn();
  }
}

template <class T>
void CpuPreconditioner<T>::preconditionOnTiles(int layer, int part, const FactorInverse& inverse_of_inputs,
                                               const FactorInverse& inverse_of_outputs) {
  if constexpr (std::is_same_v<T, float>) {
    const Columns of = columns(layer, part);
    TiledProduct& tiled = *tiled_[static_cast<std::size_t>(layer)];
    tiled.prepare(inverse_of_outputs.matrix, inverse_of_inputs.matrix, of.begin, of.of_weight + (of.bias ? 1 : 0));
    T* to = preconditioned().template mutable_data_ptr<T>() + place(layer, part);
    T* to_bias = of.bias ? to + spec(layer).rows() * of.of_weight : nullptr;
    tiled.compute({source(layer).weight_data, source(layer).bias_data, inputs(layer)}, {to, to_bias, of.of_weight},
                  tiled_work_);
  }
}

template <class T>
std::optional<double> CpuPreconditioner<T>::takeRows(int layer, const PerSampleProduct& made, double expected) {
  Source& from = sources_[static_cast<std::size_t>(layer)];
  if (!active(layer) || !made.left.defined()) {
    return std::nullopt;
  }
  const T* bias = biasGradient(layer).defined() ? from.bias_data : nullptr;
  from.row_factor = factorOf(made, from.times_signs, bias, expected * scale_);
  if (from.row_factor) {
    from.rows = made;
  }
  return from.row_factor;
}

template <class T>
void CpuPreconditioner<T>::preconditionEmbedding(int layer, const FactorInverse& inputs, const FactorInverse& outputs,
                                                 InverseForm form, T lambda) {
  const std::int64_t out = spec(layer).outputs();
  const std::int64_t tokens = spec(layer).inputs();
  const T* grad = source(layer).weight_data;  // stored as [tokens, width]
  const T* g = outputs.matrix.const_data_ptr<T>();
  const T* a = inputs.matrix.const_data_ptr<T>();  // diagonal
  T* to = preconditioned().template mutable_data_ptr<T>() + place(layer, 0);
  if (form == InverseForm::kInverse) {
    multiply(false, false, tokens, out, out, grad, out, g, out, T(0), to, out);
    for (std::int64_t token = 0; token < tokens; ++token) {
      for (std::int64_t i = 0; i < out; ++i) {
        to[token * out + i] *= a[token];
      }
    }
    return;
  }
  T* work = work_.get<T>(tokens * out);
  const T* values = outputs.values.const_data_ptr<T>();
  multiply(false, false, tokens, out, out, grad, out, g, out, T(0), work, out);
  for (std::int64_t token = 0; token < tokens; ++token) {
    for (std::int64_t i = 0; i < out; ++i) {
      work[token * out + i] /= a[token] * values[i] + lambda;
    }
  }
  multiply(false, true, tokens, out, out, work, out, g, out, T(0), to, out);
}

template <class T>
double CpuPreconditioner<T>::product(int layer) const {
  if (const auto& factor = source(layer).row_factor) {
    return *factor * *factor * source(layer).rows.product;
  }
  double sum = 0;
  for (int part = 0; part < parts(layer); ++part) {
    const Columns of = columns(layer, part);
    const T* grad = source(layer).weight_data + of.begin;
    const T* found = direction(layer, part);
    sum += dotProduct(grad, inputs(layer), found, of.of_weight, spec(layer).rows(), of.of_weight);
    if (of.bias) {
      sum += dotProduct(source(layer).bias_data, found + spec(layer).rows() * of.of_weight, spec(layer).rows());
    }
  }
  return sum;
}

template <class T>
std::int64_t CpuPreconditioner<T>::write(const std::vector<double>& rates, std::optional<double> kl_clip) {
  std::vector<double> products;
  for (int layer = 0; layer < count() && kl_clip; ++layer) {
    products.push_back(active(layer) ? product(layer) : 0);
  }
  clip_ = klClip(kl_clip, rates, products);
  std::int64_t ahead = 0;
  for (int layer = 0; layer < count(); ++layer) {
    if (active(layer) && writeAhead(layer, clip_)) {
      ++ahead;
    } else if (active(layer)) {
      writeLayer(layer, clip_);
    }
  }
  forgetSources();
  return ahead;
}

// What was written before this step was asked for it, if its factor is right.
template <class T>
bool CpuPreconditioner<T>::writeAhead(int layer, double factor) {
  Source& from = sources_[static_cast<std::size_t>(layer)];
  if (!from.row_factor || !from.written.weight.defined() || from.written.factor != factor * *from.row_factor) {
    return false;
  }
  if (const at::Tensor bias = biasGradient(layer); bias.defined()) {
    bias.copy_(from.written.bias);
  }
  const at::Tensor& gradient = spec(layer).weight.grad();
  if (!swapStorage(gradient, from.written.weight)) {
    gradient.copy_(from.written.weight);
  }
  return true;
}

template <class T>
void CpuPreconditioner<T>::writeLayer(int layer, double factor) {
  const KfacLayerSpec& of = spec(layer);
  // A gradient of another memory layout or type takes its values through one that is as the buffers are.
  const auto plain = [](const at::Tensor& tensor) {
    return tensor.is_contiguous() && tensor.scalar_type() == kType ? tensor : at::empty(tensor.sizes(), kType);
  };
  const at::Tensor weight = plain(of.weight.grad());
  const at::Tensor bias_gradient = biasGradient(layer);
  const at::Tensor bias = bias_gradient.defined() ? plain(bias_gradient) : at::Tensor();
  const std::optional<double> row_factor = source(layer).row_factor;
  if (row_factor) {
    writePerSampleProduct<T>(source(layer).rows, factor * *row_factor, tiles_ && usesTiles(of, InverseForm::kInverse),
                             weight.mutable_data_ptr<T>(), bias.defined() ? bias.mutable_data_ptr<T>() : nullptr,
                             tiled_work_);
  }
  const std::int64_t rows = spec(layer).rows();
  const std::int64_t stride = inputs(layer);
  for (int part = 0; part < parts(layer) && !row_factor; ++part) {
    const Columns columns = this->columns(layer, part);
    const T* from = direction(layer, part);
    T* to = weight.mutable_data_ptr<T>() + columns.begin;
    for (std::int64_t row = 0; row < rows; ++row, to += stride, from += columns.of_weight) {
      cpu::scaleInto(to, from, static_cast<std::size_t>(columns.of_weight), static_cast<T>(factor));
    }
    if (columns.bias && bias.defined()) {
      cpu::scaleInto(bias.mutable_data_ptr<T>(), from, static_cast<std::size_t>(rows), static_cast<T>(factor));
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

std::unique_ptr<Preconditioner> makeCpuPreconditioner(const std::vector<KfacLayerSpec>& layers, at::ScalarType type,
                                                      Preconditioner::Layout layout) {
  if (type == at::kDouble) {
    return std::make_unique<CpuPreconditioner<double>>(layers, std::move(layout));
  }
  return std::make_unique<CpuPreconditioner<float>>(layers, std::move(layout));
}

}  // namespace torchext
