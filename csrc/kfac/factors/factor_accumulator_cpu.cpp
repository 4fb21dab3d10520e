// FactorAccumulator on the CPU: loops over raw memory, and torch's BLAS.
#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "core/kfac/packed_triangle.h"
#include "kernels/cpu/weighted_sum.h"
#include "kfac/factors/factor_accumulator.h"
#include "kfac/factors/patch_correlation.h"
#include "kfac/linalg/matrix_product.h"

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

template <class T>
class CpuAccumulator final : public FactorAccumulator {
 public:
  CpuAccumulator(const std::vector<KfacLayerSpec>& layers, FactorScaling scaling)
      : FactorAccumulator(layers, at::TensorOptions(c10::CppTypeToScalarType<T>::value), scaling) {}

  std::int64_t leftOut() const override { return left_out_; }
  at::Tensor unpacked(const at::Tensor& packed, const FactorLayout& layout) const override;
  void pack(const at::Tensor& full, const FactorLayout& layout, const at::Tensor& packed) const override;
  at::Tensor traces(const at::Tensor& packed, const FactorLayout& layout) const override;
  // Loops: a dozen of ATen's operators on a number each take as long as the Cholesky decomposition of a small factor.
  at::Tensor damping(const at::Tensor& own_mean, const at::Tensor& other_mean, double damping) const override {
    at::Tensor result = at::empty({own_mean.numel()}, options());
    const auto* own = own_mean.const_data_ptr<double>();
    const auto* other = other_mean.const_data_ptr<double>();
    for (std::int64_t group = 0; group < result.numel(); ++group) {
      const double pi = std::sqrt(own[group] / other[group]);
      const double balance = std::isfinite(pi) && pi > 0 ? pi : 1;
      result.mutable_data_ptr<T>()[group] = static_cast<T>(balance * std::sqrt(damping));
    }
    return result;
  }
  std::size_t bytes() const override { return FactorAccumulator::bytes() + samples_.bytes() + product_.bytes(); }

 protected:
  CallSize addProducts(const KfacLayerSpec& spec, const FactorLayout& output_layout, const FactorLayout& input_layout,
                       const at::Tensor& input, const at::Tensor& gradient, bool first) override;
  void average(const std::vector<Share>& shares, double decay, const at::Tensor& out) override {
    for (const Share& share : shares) {
      averageFactor(share, decay, out.mutable_data_ptr<T>());
    }
  }
  void averageInPlace(const std::vector<Share>& shares, double decay) override {
    for (const Share& share : shares) {
      left_out_ += averageFactor(share, decay, running().template mutable_data_ptr<T>()) ? 0 : 1;
    }
  }

 private:
  void addProduct(const FactorLayout& layout, const SampleMatrix<T>& matrix, bool first);
  bool averageFactor(const Share& share, double decay, T* averages) const;

  Scratch samples_;
  Scratch product_;
  std::int64_t left_out_ = 0;
};

template <class T>
at::Tensor CpuAccumulator<T>::unpacked(const at::Tensor& packed, const FactorLayout& layout) const {
  if (layout.diagonal) {
    return packed.clone();
  }
  at::Tensor full = at::empty({layout.count, layout.dim, layout.dim}, packed.options());
  const std::size_t dim = unsignedOf(layout.dim);
  for (std::int64_t group = 0; group < layout.count; ++group) {
    core::unpackTriangle(packed.const_data_ptr<T>() + group * layout.triangle(), dim,
                         full.mutable_data_ptr<T>() + group * layout.dim * layout.dim, dim);
  }
  return full;
}

template <class T>
void CpuAccumulator<T>::pack(const at::Tensor& full, const FactorLayout& layout, const at::Tensor& packed) const {
  const std::size_t dim = unsignedOf(layout.dim);
  for (std::int64_t group = 0; group < layout.count; ++group) {
    core::packTriangle(full.const_data_ptr<T>() + group * layout.dim * layout.dim, dim, dim,
                       packed.mutable_data_ptr<T>() + group * layout.triangle());
  }
}

template <class T>
at::Tensor CpuAccumulator<T>::traces(const at::Tensor& packed, const FactorLayout& layout) const {
  at::Tensor traces = at::empty({layout.count}, at::kDouble);
  for (std::int64_t group = 0; group < layout.count; ++group) {
    const T* triangle = packed.const_data_ptr<T>() + group * layout.triangle();
    traces.mutable_data_ptr<double>()[group] =
        static_cast<double>(layout.diagonal ? std::accumulate(triangle, triangle + layout.dim, T(0))
                                            : core::packedTrace(triangle, unsignedOf(layout.dim)));
  }
  return traces;
}

template <class T>
FactorAccumulator::CallSize CpuAccumulator<T>::addProducts(const KfacLayerSpec& spec, const FactorLayout& output_layout,
                                                           const FactorLayout& input_layout, const at::Tensor& input,
                                                           const at::Tensor& gradient, bool first) {
  const auto gradients = gradientMatrix<T>(spec, gradient, samples_);
  if (gradients.count == 0) {
    return {};
  }
  const CallSize size{gradients.count, gradients.samples};
  addProduct(output_layout, gradients, first);
  if (spec.kind == KfacLayerSpec::Kind::kEmbedding) {
    T* counts = sums().template mutable_data_ptr<T>() + input_layout.offset;
    if (first) {
      std::fill(counts, counts + input_layout.size, T(0));
    }
    const at::Tensor tokens = input.to(at::kLong).contiguous();
    const auto* token = tokens.const_data_ptr<std::int64_t>();
    for (std::int64_t i = 0; i < tokens.numel(); ++i) {
      TORCH_CHECK_INDEX(0 <= token[i] && token[i] < input_layout.size, "torchext.optim: ", spec.name,
                        " was called with ", token[i], ", and has ", input_layout.size, " rows");
      if (token[i] != spec.padding_idx) {
        counts[token[i]] += T(1);
      }
    }
  } else if (patchCorrelationPays(spec, input)) {
    T* full = product_.get<T>(input_layout.dim * input_layout.dim);
    correlatePatches<T>(spec, input, samples_, full);
    addTriangleOf(full, input_layout.dim, first, sums().template mutable_data_ptr<T>() + input_layout.offset);
  } else {
    addProduct(input_layout, inputMatrix<T>(spec, input, samples_), first);
  }
  return size;
}

template <class T>
void CpuAccumulator<T>::addProduct(const FactorLayout& layout, const SampleMatrix<T>& matrix, bool first) {
  const std::int64_t dim = layout.dim;
  T* full = product_.get<T>(dim * dim);
  T* to = sums().template mutable_data_ptr<T>() + layout.offset;
  for (std::int64_t group = 0; group < layout.count; ++group, to += layout.triangle()) {
    const std::int64_t inner = matrix.dim;
    const T* samples = matrix.data + group * matrix.count * inner;
    symmetricProduct(samples, inner, inner, matrix.count, full, dim);
    if (inner < dim) {               // products of the bias' 1 are sums over the samples
      T* ones = full + inner * dim;  // the last row, then its copy in the last column
      std::fill(ones, ones + inner, T(0));
      for (std::int64_t sample = 0; sample < matrix.count; ++sample) {
        const T* row = samples + sample * inner;
        for (std::int64_t i = 0; i < inner; ++i) {
          ones[i] += row[i];
        }
      }
      for (std::int64_t i = 0; i < inner; ++i) {
        full[i * dim + inner] = ones[i];
      }
      ones[inner] = static_cast<T>(matrix.count);
    }
    addTriangleOf(full, dim, first, to);
  }
}

// Of all averages, this factor's. False: its sums are not finite, and the average stays.
template <class T>
bool CpuAccumulator<T>::averageFactor(const Share& share, double decay, T* averages) const {
  const FactorLayout& layout = *share.layout;
  T* out = averages + layout.offset;
  const T* old = running().template const_data_ptr<T>() + layout.offset;
  const T* sum = sums().template const_data_ptr<T>() + layout.offset;
  T trace = 0;
  for (std::int64_t group = 0; group < layout.count && !layout.diagonal; ++group) {
    trace += core::packedTrace(sum + group * layout.triangle(), unsignedOf(layout.dim));
  }
  if (!std::isfinite(trace) || !std::isfinite(share.weight)) {
    if (out != old) {
      std::copy(old, old + layout.size, out);
    }
    return false;
  }
  const std::array<const T*, 2> terms{old, sum};
  const std::array<T, 2> weights{static_cast<T>(decay), static_cast<T>(share.weight)};
  cpu::weightedSum<T>(out, terms, weights, unsignedOf(layout.size));
  return true;
}

}  // namespace

std::unique_ptr<FactorAccumulator> makeCpuAccumulator(const std::vector<KfacLayerSpec>& layers, at::ScalarType type,
                                                      FactorScaling scaling) {
  if (type == at::kDouble) {
    return std::make_unique<CpuAccumulator<double>>(layers, scaling);
  }
  return std::make_unique<CpuAccumulator<float>>(layers, scaling);
}

}  // namespace torchext
