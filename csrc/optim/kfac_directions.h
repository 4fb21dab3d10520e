// From gradients to K-FAC's directions V = G^-1 dW A^-1, and back into the parameters' .grad.
//
// Two flat buffers, gradients and directions, hold every layer as [outputs, inputs (+ 1 for the bias)], directions in
// such an order that what one rank computes for others lies together. A layer's direction may be split by columns into
// as many parts as there are ranks: both products of V shrink with the number of columns. A step: collect(),
// precondition() of this rank's layers and parts, (the engine exchanges the others), product(), write(). Not
// thread-safe: the engine locks.
#pragma once

#include <cstdint>
#include <vector>

#include <ATen/ATen.h>

#include "optim/factor_inverse.h"
#include "optim/kfac_layer.h"

namespace torchext {

class KfacDirections {
 public:
  // order: layers in the order of the buffer. parts: [layer] 1, or into how many it is split. layers outlive this.
  KfacDirections(const std::vector<KfacLayerSpec>& layers, at::ScalarType type, const std::vector<int>& order,
                 std::vector<int> parts);
  // Whether a layer can be split: the products of one matrix, in the form that needs no full intermediate.
  static bool splits(const KfacLayerSpec& spec, InverseForm form);

  // Copies the parameters' gradients, times `scale`. Layers without a gradient take no part. False: one is not finite.
  bool collect(double scale);
  bool active(int layer) const { return active_[static_cast<std::size_t>(layer)]; }
  int parts(int layer) const { return parts_[static_cast<std::size_t>(layer)]; }
  // V of one part of a layer; the gradient itself where an inverse was never made. damping is used by kEigen only.
  void precondition(int layer, int part, const FactorInverse& inputs, const FactorInverse& outputs, InverseForm form,
                    double damping);
  // sum of rates[layer]^2 <V, dW> over the active layers.
  double product(const std::vector<double>& rates) const;
  // .grad = factor * V.
  void write(double factor);

  at::Tensor slice(int layer) const;      // of the directions, of a layer in one part
  at::Tensor splitSlice(int part) const;  // of that part of all layers that are split; may be empty
  std::size_t bytes() const { return gradients_.nbytes() + directions_.nbytes() + work_.bytes(); }

 private:
  template <class T>
  bool collectTyped(double scale);
  template <class T>
  void preconditionTyped(int layer, int part, const FactorInverse& inputs, const FactorInverse& outputs,
                         InverseForm form, double damping);
  template <class T>
  double productTyped(int layer) const;
  template <class T>
  void writeTyped(int layer, T factor);
  std::int64_t size(int layer) const;
  std::int64_t rows(int layer) const;
  // Columns of a part begin here; those of part + 1 are the end.
  std::int64_t column(int layer, int part) const;

  const std::vector<KfacLayerSpec>& layers_;
  std::vector<int> parts_;                         // [layer]
  std::vector<std::int64_t> offsets_;              // [layer] in the gradients
  std::vector<std::vector<std::int64_t>> places_;  // [layer][part] in the directions
  std::vector<std::int64_t> split_ends_;           // [part] in the directions, after a first entry: where they begin
  std::vector<bool> active_;                       // [layer]
  at::Tensor gradients_;
  at::Tensor directions_;
  Scratch work_;
};

}  // namespace torchext
