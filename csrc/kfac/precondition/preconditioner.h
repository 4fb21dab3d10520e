// Preconditioner: from gradients to K-FAC's preconditioned gradients (directions) V = G^-1 dW A^-1, and back into the
// parameters' .grad.
//
// Two flat buffers, gradients and directions, hold every layer as [outputs, inputs (+ 1 for the bias)], directions in
// such an order that what one rank computes for others lies together. A layer's direction may be split by columns into
// as many parts as there are ranks: both products of V shrink with the number of columns. A step: collect(),
// precondition() of this rank's layers and parts, (the engine exchanges the others), write(). Not thread-safe: the
// engine locks.
//
// The arithmetic has two implementations. makeCpuPreconditioner(): loops on raw memory, and BLAS or the processor's
// matrix tiles (tiled_product.h). makeAtenPreconditioner():
// ATen on any device; the answer of collect() is the one thing that waits for it, once a step.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/ATen.h>

#include "kfac/base/kfac_layer.h"
#include "kfac/linalg/factor_inverse.h"
#include "kfac/precondition/per_sample_product.h"
#include "kfac/precondition/tiled_product.h"

namespace torchext {

class Preconditioner {
 public:
  struct Layout {
    std::vector<int> order;  // layers in the order of the buffer
    std::vector<int> parts;  // [layer] 1, or into how many it is split
    bool tiles = false;      // the processor's, for layers where usesTiles()
  };
  virtual ~Preconditioner() = default;
  Preconditioner(const Preconditioner&) = delete;
  Preconditioner& operator=(const Preconditioner&) = delete;
  // Whether a layer can be split: the products of one matrix, in the form that needs no full intermediate.
  static bool splits(const KfacLayerSpec& spec, InverseForm form);
  // Whether a layer is one for the tiles, where the processor has them.
  static bool usesTiles(const KfacLayerSpec& spec, InverseForm form);

  // Copies the parameters' gradients, times `scale`. Layers whose weight has none take no part. False: one of them, or
  // of `others`, is not finite. of_rows: layers, in one part, for which takeRows() may be called; empty: none.
  virtual bool collect(double scale, const std::vector<at::Tensor>& others, const std::vector<bool>& of_rows) = 0;
  bool active(int layer) const { return active_[static_cast<std::size_t>(layer)]; }
  int parts(int layer) const { return parts_[static_cast<std::size_t>(layer)]; }
  // A layer's on the processor's matrix tiles, for whom directions are not made here; null where it is none for them.
  virtual std::shared_ptr<TiledProduct> tiled(int /*layer*/) { return nullptr; }
  // V of one part of a layer; the gradient itself where an inverse was never made. damping is used by kEigen only.
  virtual void precondition(int layer, int part, const FactorInverse& inputs, const FactorInverse& outputs,
                            InverseForm form, double damping) = 0;
  // V of a layer is to be that of rows, if its gradient is theirs (per_sample_product.h); then returns the factor.
  // expected: that, but for the scale of collect(). None: the gradient is another; nothing was done.
  virtual std::optional<double> takeRows(int /*layer*/, const PerSampleProduct& /*made*/, double /*expected*/) {
    return std::nullopt;
  }
  // After takeRows(): what it is likely to be. write() uses it if its factor is right, and may take the memory of the
  // gradient for it.
  virtual void takeWritten(int /*layer*/, const WrittenGradient& /*written*/) {}
  // .grad = nu V, with nu of the active layers (kl_clip.h). Returns of how many what takeWritten() brought was used.
  virtual std::int64_t write(const std::vector<double>& rates, std::optional<double> kl_clip) = 0;
  virtual double clip() const = 0;  // nu of the last write()

  at::TensorOptions options() const { return gradients_.options(); }  // type and device
  // Layers that are split, as they lie in the buffer.
  const std::vector<int>& split() const { return split_; }
  at::Tensor slice(int layer) const;  // of the directions, of a layer in one part
  // That part of some layers that are split: from `first` to `last` of split(), and of those between.
  at::Tensor splitSlice(int part, int first, int last) const;
  virtual std::size_t bytes() const { return gradients_.nbytes() + preconditioned_.nbytes(); }

 protected:
  // layers outlive this. options: kFloat or kDouble, and the device.
  Preconditioner(const std::vector<KfacLayerSpec>& layers, const at::TensorOptions& options, Layout layout);

  int count() const { return static_cast<int>(layers_.size()); }
  const KfacLayerSpec& spec(int layer) const { return layers_[static_cast<std::size_t>(layer)]; }
  // Finds out which layers are active: those whose weight has a gradient.
  void findActive();
  // Undefined without a bias, and where it was frozen in training: its column is zero then, and goes nowhere.
  at::Tensor biasGradient(int layer) const;
  // Columns of a part begin here; those of part + 1 are the end.
  std::int64_t column(int layer, int part) const;
  std::int64_t offset(int layer) const { return offsets_[static_cast<std::size_t>(layer)]; }
  std::int64_t place(int layer, int part) const {
    return places_[static_cast<std::size_t>(layer)][static_cast<std::size_t>(part)];
  }
  const at::Tensor& gradients() const { return gradients_; }
  const at::Tensor& preconditioned() const { return preconditioned_; }

 private:
  const std::vector<KfacLayerSpec>& layers_;
  std::vector<int> parts_;                         // [layer]
  std::vector<std::int64_t> offsets_;              // [layer] in the gradients
  std::vector<std::vector<std::int64_t>> places_;  // [layer][part] in the directions
  std::vector<int> split_;
  std::vector<bool> active_;  // [layer]
  at::Tensor gradients_;
  at::Tensor preconditioned_;
};

std::unique_ptr<Preconditioner> makeCpuPreconditioner(const std::vector<KfacLayerSpec>& layers, at::ScalarType type,
                                                      Preconditioner::Layout layout);
std::unique_ptr<Preconditioner> makeAtenPreconditioner(const std::vector<KfacLayerSpec>& layers,
                                                       const at::TensorOptions& options, Preconditioner::Layout layout);

}  // namespace torchext
