// From gradients to K-FAC's directions V = G^-1 dW A^-1, and back into the parameters' .grad.
//
// Two flat buffers, gradients and directions, hold every layer as [outputs, inputs (+ 1 for the bias)], ordered so that
// what one rank computes for others lies together. A step: collect(), precondition() of this rank's layers, (the engine
// exchanges the others), clip(), write(). Not thread-safe: the engine locks.
#pragma once

#include <cstdint>
#include <vector>

#include <ATen/ATen.h>

#include "optim/factor_inverse.h"
#include "optim/kfac_layer.h"

namespace torchext {

enum class InverseForm { kInverse, kEigen };

class KfacDirections {
 public:
  // order: layers in the order of the buffers. layers outlive this.
  KfacDirections(const std::vector<KfacLayerSpec>& layers, at::ScalarType type, const std::vector<int>& order);

  // Copies the parameters' gradients, times `scale`. Layers without a gradient take no part. False: one is not finite.
  bool collect(double scale);
  bool active(int layer) const { return active_[static_cast<std::size_t>(layer)]; }
  // V of one layer; the gradient itself where an inverse was never made. damping is used by kEigen only.
  void precondition(int layer, const FactorInverse& inputs, const FactorInverse& outputs, InverseForm form,
                    double damping);
  // sum of rates[layer]^2 <V, dW> over the active layers.
  double product(const std::vector<double>& rates) const;
  // .grad = factor * V.
  void write(double factor);

  at::Tensor slice(int layer) const;  // of the directions
  std::size_t bytes() const { return gradients_.nbytes() + directions_.nbytes() + work_.bytes(); }

 private:
  template <class T>
  bool collectTyped(double scale);
  template <class T>
  void preconditionTyped(int layer, const FactorInverse& inputs, const FactorInverse& outputs, InverseForm form,
                         double damping);
  std::int64_t size(int layer) const;

  const std::vector<KfacLayerSpec>& layers_;
  std::vector<std::int64_t> offsets_;  // [layer]
  std::vector<bool> active_;           // [layer]
  at::Tensor gradients_;
  at::Tensor directions_;
  Scratch work_;
};

// Whether all elements of a dense gradient are finite; any layout and type.
bool isFinite(const at::Tensor& tensor);

}  // namespace torchext
