// A rank's own Kronecker factors: sums of a step's contributions, and their running averages.
//
// Conventions (a: input with an appended 1, g: gradient of the mean loss at the output, N samples, R = N * positions):
//   "kfc":           A = (1/N) sum a a^T          G = (N^2/R) sum g g^T          (Grosse & Martens 2016)
//   "kfac-pytorch":  A = (1/(R T^2)) sum a a^T    G = (1/(R T^2)) sum g g^T      (T = R/N for convolutions, else 1)
// N counts all micro-batches of an accumulated step: the gradient of their mean is what the user accumulates. Calls of
// a module inside one backward pass are positions, not samples.
//
// Running average: F <- decay F + (1 - decay) new, from F = I. Every rank averages its *own* batches, and never takes
// over what others have: the mean over ranks of these averages is the average of the means, so that factors need to
// travel only when inverses are made, however often they are updated in between.
//
// Storage: all factors as packed triangles in two flat buffers (running, and this step's sums), in the order of
// sending. Not thread-safe: the engine locks.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/ATen.h>

#include "optim/factor_slot.h"
#include "optim/kfac_layer.h"
#include "optim/kfac_options.h"

namespace torchext {

class KfacStatistics {
 public:
  // layers outlive this. type: kFloat or kDouble.
  KfacStatistics(const std::vector<KfacLayerSpec>& layers, at::ScalarType type, FactorScaling scaling);

  const std::vector<FactorSlot>& slots() const { return slots_; }
  std::int64_t elements() const { return running_.numel(); }
  at::ScalarType type() const { return type_; }
  at::Tensor slice(const at::Tensor& buffer, const FactorSlot& slot) const {
    return buffer.narrow(0, slot.offset, slot.size);
  }
  const at::Tensor& running() const { return running_; }

  // A module's input and the gradient at its output. backward_pass tells calls of one backward pass from others.
  void add(int layer, const at::Tensor& input, const at::Tensor& gradient, int backward_pass);
  int calls(int layer) const { return steps_[static_cast<std::size_t>(layer)].calls; }

  // What merge() will make of a slot, into `out`, nothing changed. False: the sums are not finite, out is what it was.
  bool preview(const FactorSlot& slot, double decay, double loss_scale, const at::Tensor& out) const;
  // Ends the step: takes its sums into the running averages. Sums that are not finite are left out; returns how many.
  int merge(double decay, double loss_scale);
  // Ends the step without it.
  void discard();

  std::size_t bytes() const;

 private:
  struct LayerStep {
    std::int64_t samples = 0;
    std::int64_t rows = 0;
    int calls = 0;
    int backward_pass = -2;
  };
  template <class T>
  void addTyped(int layer, const at::Tensor& input, const at::Tensor& gradient, int backward_pass);
  template <class T>
  void addProduct(const FactorSlot& slot, const SampleMatrix<T>& matrix, bool first);
  template <class T>
  bool mergeInto(const FactorSlot& slot, double decay, double loss_scale, T* out) const;
  double coefficient(const FactorSlot& slot, double loss_scale) const;

  const std::vector<KfacLayerSpec>& layers_;
  at::ScalarType type_;
  FactorScaling scaling_;
  std::vector<FactorSlot> slots_;
  std::vector<std::size_t> first_slot_;  // [layer] its G; its A follows
  std::vector<LayerStep> steps_;         // [layer]
  at::Tensor running_;
  at::Tensor sums_;
  Scratch samples_;
  Scratch product_;
};

}  // namespace torchext
