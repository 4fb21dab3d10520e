// KfacStatistics on the CPU: loops over raw memory, and torch's BLAS.
#include <algorithm>
#include <array>
#include <cmath>

#include "core/kfac/packed_triangle.h"
#include "kernels/cpu/weighted_sum.h"
#include "kfac/factors/kept_samples.h"
#include "kfac/factors/kfac_statistics.h"
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
class CpuStatistics final : public KfacStatistics {
 public:
  CpuStatistics(const std::vector<KfacLayerSpec>& layers, FactorScaling scaling)
      : KfacStatistics(layers, at::TensorOptions(c10::CppTypeToScalarType<T>::value), scaling) {
    for (const FactorSlot& slot : slots()) {
      kept_.emplace_back(slot.dim);
    }
  }

  std::int64_t leftOut() const override { return left_out_; }
  at::Tensor unpacked(const at::Tensor& packed, const FactorSlot& slot) const override {
    return unpackedFactor(packed, slot);
  }
  void pack(const at::Tensor& full, const FactorSlot& slot, const at::Tensor& packed) const override {
    packFactor(full, slot, packed);
  }
  at::Tensor traces(const at::Tensor& packed, const FactorSlot& slot) const override {
    return tracesOfFactor(packed, slot);
  }
  void settle() override {
    for (const FactorSlot& slot : slots()) {
      settleSlot(slot);
    }
  }
  void discard() override {
    KfacStatistics::discard();
    for (auto& kept : kept_) {
      kept.discard();
    }
  }
  std::size_t bytes() const override;

 protected:
  CallSize addProducts(const KfacLayerSpec& spec, const FactorSlot& output_slot, const FactorSlot& input_slot,
                       const at::Tensor& input, const at::Tensor& gradient, bool first, bool at_once) override;
  void average(const std::vector<Share>& shares, double decay, const at::Tensor& out) override;
  void averageInPlace(const std::vector<Share>& shares, double decay) override;

 private:
  KeptSamples<T>& keptOf(const FactorSlot& slot) { return kept_[static_cast<std::size_t>(&slot - slots().data())]; }
  T* averageOf(const FactorSlot& slot) { return unsettled().template mutable_data_ptr<T>() + slot.offset; }
  T* sumsOf(const FactorSlot& slot) { return sums().template mutable_data_ptr<T>() + slot.offset; }
  void settleSlot(const FactorSlot& slot) { keptOf(slot).settle(product_, averageOf(slot)); }
  bool sumKept(const FactorSlot& slot);
  bool keep(const FactorSlot& slot, const SampleMatrix<T>& matrix);
  void addSamples(const FactorSlot& slot, const SampleMatrix<T>& matrix, bool first, bool at_once);
  void addProduct(const FactorSlot& slot, const SampleMatrix<T>& matrix, bool first);
  bool averageSlot(const Share& share, double decay, T* out) const;

  std::vector<KeptSamples<T>> kept_;  // [slot]
  Scratch samples_;
  Scratch product_;
  std::int64_t left_out_ = 0;
};

template <class T>
std::size_t CpuStatistics<T>::bytes() const {
  std::size_t bytes = KfacStatistics::bytes() + samples_.bytes() + product_.bytes();
  for (const auto& kept : kept_) {
    bytes += kept.bytes();
  }
  return bytes;
}

template <class T>
void CpuStatistics<T>::average(const std::vector<Share>& shares, double decay, const at::Tensor& out) {
  for (const Share& share : shares) {
    settleSlot(*share.slot);
    sumKept(*share.slot);
    averageSlot(share, decay, out.mutable_data_ptr<T>() + share.slot->offset);
  }
}

template <class T>
void CpuStatistics<T>::averageInPlace(const std::vector<Share>& shares, double decay) {
  for (const Share& share : shares) {
    KeptSamples<T>& kept = keptOf(*share.slot);
    bool finite = false;
    if (kept.open() > 0) {
      finite = std::isfinite(kept.trace()) && std::isfinite(share.weight);
      if (finite) {
        kept.merge(decay, share.weight);
      } else {
        kept.discard();
      }
    } else {
      settleSlot(*share.slot);
      finite = averageSlot(share, decay, averageOf(*share.slot));
    }
    left_out_ += finite ? 0 : 1;
  }
}

// Makes this step's sums of what was kept of it; whether there was anything.
template <class T>
bool CpuStatistics<T>::sumKept(const FactorSlot& slot) {
  KeptSamples<T>& kept = keptOf(slot);
  if (kept.open() == 0) {
    return false;
  }
  kept.product(product_, sumsOf(slot));
  kept.discard();
  return true;
}

template <class T>
bool CpuStatistics<T>::keep(const FactorSlot& slot, const SampleMatrix<T>& matrix) {
  KeptSamples<T>& kept = keptOf(slot);
  const bool fits = slot.count == 1 && (matrix.dim == slot.dim || matrix.dim + 1 == slot.dim) &&
                    kept.open() + matrix.count <= KeptSamples<T>::kMostOfAStep;
  if (!fits) {
    return false;
  }
  if (kept.add(matrix.data, matrix.count, matrix.dim)) {
    return true;
  }
  settleSlot(slot);
  return kept.add(matrix.data, matrix.count, matrix.dim);
}

// first: of the step. A step's samples are all kept, or all summed.
template <class T>
void CpuStatistics<T>::addSamples(const FactorSlot& slot, const SampleMatrix<T>& matrix, bool first, bool at_once) {
  if (!at_once && (first || keptOf(slot).open() > 0) && keep(slot, matrix)) {
    return;
  }
  const bool kept = sumKept(slot);
  addProduct(slot, matrix, first && !kept);
}

template <class T>
KfacStatistics::CallSize CpuStatistics<T>::addProducts(const KfacLayerSpec& spec, const FactorSlot& output_slot,
                                                       const FactorSlot& input_slot, const at::Tensor& input,
                                                       const at::Tensor& gradient, bool first, bool at_once) {
  const auto gradients = gradientMatrix<T>(spec, gradient, samples_);
  if (gradients.count == 0) {
    return {};
  }
  const CallSize size{gradients.count, gradients.samples};
  addSamples(output_slot, gradients, first, at_once);
  if (spec.kind == KfacLayerSpec::Kind::kEmbedding) {
    T* counts = sums().template mutable_data_ptr<T>() + input_slot.offset;
    if (first) {
      std::fill(counts, counts + input_slot.size, T(0));
    }
    const at::Tensor tokens = input.to(at::kLong).contiguous();
    const auto* token = tokens.const_data_ptr<std::int64_t>();
    for (std::int64_t i = 0; i < tokens.numel(); ++i) {
      TORCH_CHECK_INDEX(0 <= token[i] && token[i] < input_slot.size, "torchext.optim: ", spec.name, " was called with ",
                        token[i], ", and has ", input_slot.size, " rows");
      if (token[i] != spec.padding_idx) {
        counts[token[i]] += T(1);
      }
    }
  } else if (patchCorrelationPays(spec, input)) {
    T* full = product_.get<T>(input_slot.dim * input_slot.dim);
    correlatePatches<T>(spec, input, samples_, full);
    addTriangleOf(full, input_slot.dim, first, sums().template mutable_data_ptr<T>() + input_slot.offset);
  } else {
    addSamples(input_slot, inputMatrix<T>(spec, input, samples_), first, at_once);
  }
  return size;
}

template <class T>
void CpuStatistics<T>::addProduct(const FactorSlot& slot, const SampleMatrix<T>& matrix, bool first) {
  const std::int64_t dim = slot.dim;
  T* full = product_.get<T>(dim * dim);
  T* to = sums().template mutable_data_ptr<T>() + slot.offset;
  for (std::int64_t group = 0; group < slot.count; ++group, to += slot.triangle()) {
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

template <class T>
bool CpuStatistics<T>::averageSlot(const Share& share, double decay, T* out) const {
  const FactorSlot& slot = *share.slot;
  const T* old = unsettled().template const_data_ptr<T>() + slot.offset;
  const T* sum = sums().template const_data_ptr<T>() + slot.offset;
  T trace = 0;
  for (std::int64_t group = 0; group < slot.count && !slot.diagonal; ++group) {
    trace += core::packedTrace(sum + group * slot.triangle(), unsignedOf(slot.dim));
  }
  if (!std::isfinite(trace) || !std::isfinite(share.weight)) {
    if (out != old) {
      std::copy(old, old + slot.size, out);
    }
    return false;
  }
  const std::array<const T*, 2> terms{old, sum};
  const std::array<T, 2> weights{static_cast<T>(decay), static_cast<T>(share.weight)};
  cpu::weightedSum<T>(out, terms, weights, unsignedOf(slot.size));
  return true;
}

}  // namespace

std::unique_ptr<KfacStatistics> makeCpuStatistics(const std::vector<KfacLayerSpec>& layers, at::ScalarType type,
                                                  FactorScaling scaling) {
  if (type == at::kDouble) {
    return std::make_unique<CpuStatistics<double>>(layers, scaling);
  }
  return std::make_unique<CpuStatistics<float>>(layers, scaling);
}

}  // namespace torchext
