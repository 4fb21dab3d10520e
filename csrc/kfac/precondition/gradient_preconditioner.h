// GradientPreconditioner replaces a step's gradients by K-FAC's preconditioned gradients (directions), on all ranks.
//
// The path of the data. A step is load(), make() of each layer, exchange(), write(). The first reads .grad. Each make()
// computes this rank's part of a layer's direction (preconditioner.h). In steps that make inverses a layer is made when
// its inverses are there, while later ones travel; the rest in makeRest(). Then exchange() brings directions to the
// ranks that have not made them (gradient_exchange.h). Last, write() scales them by the KL clip and stores them into
// .grad.
//
// Directions of rows. In steps that make no inverses ranks gather the rows of which Linear layers' gradients are made,
// where the costs say so (per_sample_plan.h). Directions are made of those rows (per_sample_preconditioner.h), which
// keep() takes inside the backward pass. A layer whose gradient in .grad is not that of its rows gets its direction the
// usual way, on every rank by itself.
//
// Threads: the engine's lock. Errors of the group as they come; nothing waits for a peer in write().
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/ATen.h>

#include "core/kfac/kfac_plan.h"
#include "kfac/comm/kfac_context.h"
#include "kfac/linalg/factor_inverse.h"
#include "kfac/precondition/gradient_exchange.h"
#include "kfac/precondition/per_sample_plan.h"
#include "kfac/precondition/per_sample_preconditioner.h"
#include "kfac/precondition/preconditioner.h"

namespace torchext {

class GradientPreconditioner {
 public:
  // options: type and device of directions. inverses: [factor], as they are in force. All references outlive this.
  GradientPreconditioner(KfacContext& context, const core::KfacPlan& plan, const core::KfacPlanInput& input,
                         const at::TensorOptions& options, bool tiles, const std::vector<FactorInverse>& inverses);

  // Whether a layer's direction is made of rows in this step.
  bool ofRows(int layer) const { return per_sample_ && !context_.updatesInverses() && per_sample_->rows().has(layer); }
  // A call of a layer in the backward pass. True: begin() is to be called when that pass has ended.
  bool keep(int layer, const at::Tensor& input, const at::Tensor& gradient);
  void begin();

  // Reads .grad, times `scale`, and sends what rows have not left yet. False: one of these gradients, or of `others`,
  // is not finite.
  bool load(double scale, const std::vector<at::Tensor>& others);
  // This rank's part of a layer's direction. Nothing where that is done.
  void make(int layer);
  void makeRest();
  // Until all directions are here.
  void exchange();
  // rates: of each layer, for the clip.
  void write(const std::vector<double>& rates);
  // Ends a step after load() without it.
  void skip();
  // Drops rows that were kept and have not left.
  void forget();

  // This rank's rows of each layer, [layers].
  at::Tensor ownRowCounts() const { return per_sample_plan_.ownCounts(); }
  // Chooses the layers of rows anew, for steps to come with the inverses that are there. counts: [ranks, layers].
  void planRows(const at::Tensor& counts);
  // There are other inverses now than those that this step's directions of rows were begun with.
  void inversesChanged();

  double clip() const { return preconditioner_->clip(); }  // nu of the last step
  std::size_t rowLayers() const { return per_sample_ ? per_sample_->rows().matrices().size() : 0; }
  std::size_t bytes() const { return preconditioner_->bytes() + (per_sample_ ? per_sample_->bytes() : 0); }

 private:
  bool rowsTravelNow() const { return per_sample_ && !context_.updatesInverses(); }
  bool rowsReplaceShares() const;
  bool makeOfRows(int layer);
  void takeWritten();
  void endRows();
  void foreseeScaling(const std::vector<double>& rates);
  void prepareRows();

  KfacContext& context_;
  const core::KfacPlan& plan_;
  const std::vector<FactorInverse>& inverses_;
  PerSamplePlan per_sample_plan_;
  std::unique_ptr<Preconditioner> preconditioner_;
  std::optional<GradientExchange> gradient_exchange_;    // made with the preconditioner
  std::vector<bool> made_;                               // [layer] its direction, in this step, here
  std::unique_ptr<PerSamplePreconditioner> per_sample_;  // null: of no layer
  bool rows_void_ = false;                               // this step's directions of rows are of other inverses
  // Of directions of rows in this step, 0 for other ones: the factor, and <V, dW>.
  std::vector<double> row_factors_;
  std::vector<double> row_products_;
  // Of the last step in which all directions were of rows.
  std::optional<PerSamplePreconditioner::Scaling> row_scaling_;
};

}  // namespace torchext
