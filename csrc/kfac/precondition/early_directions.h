// Directions of Linear layers that are made inside the backward pass, of this rank's own gradient, before the ranks
// average anything (early_directions).
//
// A direction V = G^-1 dW A^-1 is linear in dW, so the mean over ranks of their directions is the direction of their
// mean gradient: what DDP averages is V, and no direction has to travel. And as dW = sum g a^T over the rows of the
// calls, V = (sum (G^-1 g)(A^-1 a)^T costs 3 rows n^2 for a layer n wide where the products of full matrices cost 2
// n^3: with fewer rows than two thirds of the width that is less. Where rows are many it is those products, of dW.
//
// The path of the data. keep() takes what a call has read and the gradient at its output. When autograd has the
// parameter's whole gradient, ofWeight() and ofBias() take it and return the direction that .grad gets instead. Each
// needs the calls alone, for one does not wait for the other. The gradients themselves are held until the step: the KL
// clip is made of <V, dW>, of which every rank has its share (product()). forget() ends a step.
//
// The calls must be all that the gradient is made of. A penalty on a weight in the loss, or a use of it outside of its
// layer, would be left out without a word: so both parameters' gradients are compared with those of the calls (the
// weight's times a vector of signs), and where they differ the direction is not a number. Then no rank takes that step,
// and misused() says which layer it was.
//
// In ATen, on any device, and the products on the processor's matrix tiles where others use them; nothing waits for an
// accelerator but misused(). Not thread-safe: the engine locks.
#pragma once

#include <cstdint>
#include <vector>

#include <ATen/ATen.h>

#include "kfac/base/kfac_layer.h"
#include "kfac/linalg/factor_inverse.h"
#include "kfac/precondition/preconditioner.h"

namespace torchext {

class EarlyDirections {
 public:
  // layers outlive this. options: the type and the device of inverses.
  EarlyDirections(const std::vector<KfacLayerSpec>& layers, const at::TensorOptions& options);

  // Layers whose directions can be made so.
  static bool takes(const KfacLayerSpec& spec) { return spec.kind == KfacLayerSpec::Kind::kLinear; }

  // pass: of backward; calls of another one are forgotten.
  void keep(int layer, const at::Tensor& input, const at::Tensor& gradient, int pass);
  // Where inverses were never made the gradient is the direction. pass: as that of the calls.
  at::Tensor ofWeight(int layer, const at::Tensor& gradient, const FactorInverse& inputs, const FactorInverse& outputs,
                      const Preconditioner::Tiles& tiles, int pass);
  at::Tensor ofBias(int layer, const at::Tensor& gradient, const FactorInverse& inputs, const FactorInverse& outputs,
                    int pass);

  // Whether a layer's gradient was taken since the last step.
  bool made(int layer) const { return held_[static_cast<std::size_t>(layer)].weight.defined(); }
  // sum of rates[layer]^2 <.grad, dW> over the layers, dW being what this rank has held; one float64 on the device.
  at::Tensor product(const std::vector<double>& rates) const;
  // The layer whose gradient was not that of its calls alone, or -1. Waits for the device.
  int misused() const;
  void forget();
  std::size_t bytes() const;
  std::int64_t count() const { return count_; }  // of directions, ever

 private:
  // The calls of one backward pass as rows, in the type of inverses: a [rows, in], g [rows, out].
  struct Calls {
    int pass = -1;
    std::vector<at::Tensor> inputs;
    std::vector<at::Tensor> gradients;
    double rounding = 0;  // relative, of the gradient that autograd makes of them
  };
  struct Held {
    at::Tensor weight;
    at::Tensor bias;
    at::Tensor misused;  // one bool on the device
  };
  const KfacLayerSpec& spec(int layer) const { return layers_[static_cast<std::size_t>(layer)]; }
  Calls& callsOf(int layer, int pass);
  static void join(Calls& calls);
  // Whether the bias takes part: it has one that is trained now.
  bool trainsBias(int layer) const;
  void hold(at::Tensor Held::*which, int layer, const at::Tensor& gradient);
  // Marks the layer, and its direction, if `found` and `expected` differ by more than so much.
  void compare(int layer, const at::Tensor& found, const at::Tensor& expected, const at::Tensor& most,
               at::Tensor& direction);
  at::Tensor signs(std::int64_t size);

  const std::vector<KfacLayerSpec>& layers_;
  at::TensorOptions options_;
  std::vector<Calls> calls_;  // [layer]
  std::vector<Held> held_;    // [layer]
  at::Tensor signs_;
  std::int64_t count_ = 0;
};

}  // namespace torchext
