// FactorAccumulator: a rank's own Kronecker factors, as sums of a step's contributions, and their running averages.
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
// sending, on the model's device. Not thread-safe: the engine locks.
//
// The arithmetic has two implementations. makeCpuAccumulator(): loops and BLAS on raw memory. makeAtenAccumulator():
// ATen and the operators of kernels/factor.h, on any device; no call but leftOut() waits for it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/ATen.h>

#include "kfac/base/kfac_layer.h"
#include "kfac/base/kfac_options.h"
#include "kfac/comm/kfac_context.h"
#include "kfac/factors/factor_layout.h"

namespace torchext {

class FactorAccumulator {
 public:
  virtual ~FactorAccumulator() = default;
  FactorAccumulator(const FactorAccumulator&) = delete;
  FactorAccumulator& operator=(const FactorAccumulator&) = delete;

  const std::vector<FactorLayout>& layouts() const { return layouts_; }
  std::int64_t elements() const { return running_.numel(); }
  at::ScalarType type() const { return running_.scalar_type(); }
  at::TensorOptions options() const { return running_.options(); }  // type and device
  at::Tensor slice(const at::Tensor& buffer, const FactorLayout& layout) const {
    return buffer.narrow(0, layout.offset, layout.size);
  }
  const at::Tensor& running() const { return running_; }

  // A module's input and the gradient at its output. backward_pass tells calls of one backward pass from others.
  void add(int layer, const at::Tensor& input, const at::Tensor& gradient, int backward_pass);
  int calls(int layer) const { return steps_[static_cast<std::size_t>(layer)].calls; }

  // What merge() will make of a factor, into `out`, laid out as the running averages; nothing changed.
  void preview(const FactorLayout& layout, double decay, double loss_scale, const at::Tensor& out);
  // Ends the step: takes its sums into the running averages. Sums that are not finite are left out.
  void merge(double decay, double loss_scale);
  // How many were, ever.
  virtual std::int64_t leftOut() const = 0;
  // Ends the step without it.
  void discard();

  // In these three layout is one of layouts().
  // [count, dim, dim] from a factor's packed triangles; a copy of a diagonal.
  virtual at::Tensor unpacked(const at::Tensor& packed, const FactorLayout& layout) const = 0;
  // The triangles of full [count, dim, dim] into packed.
  virtual void pack(const at::Tensor& full, const FactorLayout& layout, const at::Tensor& packed) const = 0;
  // [count] in float64, of a packed factor.
  virtual at::Tensor traces(const at::Tensor& packed, const FactorLayout& layout) const = 0;

  // Of a factor, [count] in its type: Factored Tikhonov, balanced by its mean eigenvalues and those of the layer's
  // other factor, each [count] in float64.
  virtual at::Tensor damping(const at::Tensor& own_mean, const at::Tensor& other_mean, double damping) const = 0;

  virtual std::size_t bytes() const { return running_.nbytes() + sums_.nbytes(); }

 protected:
  // layers outlive this. options: kFloat or kDouble, and the device.
  FactorAccumulator(const std::vector<KfacLayerSpec>& layers, const at::TensorOptions& options, FactorScaling scaling);

  // Rows of g that a call had, and samples.
  struct CallSize {
    std::int64_t rows = 0;
    std::int64_t samples = 0;
  };
  // Adds a call's products to the sums of its two factors, or begins them. Nothing where there are no rows.
  virtual CallSize addProducts(const KfacLayerSpec& spec, const FactorLayout& output_layout,
                               const FactorLayout& input_layout, const at::Tensor& input, const at::Tensor& gradient,
                               bool first) = 0;
  // out = decay * running + weight * sums of each factor; where the sums are not finite, out = running.
  struct Share {
    const FactorLayout* layout;
    double weight;
  };
  virtual void average(const std::vector<Share>& shares, double decay, const at::Tensor& out) = 0;
  // The same with out = running(); counts what was not finite.
  virtual void averageInPlace(const std::vector<Share>& shares, double decay) = 0;

  const at::Tensor& sums() const { return sums_; }
  // Where the diagonal of all groups lies in the factor, as indices on the CPU.
  static at::Tensor diagonalPlaces(const FactorLayout& layout);

 private:
  struct LayerStep {
    std::int64_t samples = 0;
    std::int64_t rows = 0;
    int calls = 0;
    int backward_pass = -2;
  };
  double weightOf(const FactorLayout& layout, double decay, double loss_scale) const;

  const std::vector<KfacLayerSpec>& layers_;
  FactorScaling scaling_;
  std::vector<FactorLayout> layouts_;
  std::vector<std::size_t> first_factor_;  // [layer] its G; its A follows
  std::vector<LayerStep> steps_;           // [layer]
  at::Tensor running_;
  at::Tensor sums_;
};

// By the context's layers, options and device. context: outlives what is made.
std::unique_ptr<FactorAccumulator> makeAccumulator(const KfacContext& context);
std::unique_ptr<FactorAccumulator> makeCpuAccumulator(const std::vector<KfacLayerSpec>& layers, at::ScalarType type,
                                                      FactorScaling scaling);
std::unique_ptr<FactorAccumulator> makeAtenAccumulator(const std::vector<KfacLayerSpec>& layers,
                                                       const at::TensorOptions& options, FactorScaling scaling);

}  // namespace torchext
