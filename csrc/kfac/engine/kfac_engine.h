// KfacEngine runs K-FAC's steps behind torchext.optim, for one process or a group of ranks.
//
// The path of the data. Hooks of modules make the sums of a step's factors (factor_hooks.h). The caller calls step()
// after the backward pass, when .grad holds the gradient that all ranks share. The step takes the sums into the running
// averages, and every `inverse_update_steps` brings the ranks' averages together (factor_exchange.h). Their inverses go
// to the ranks that use them (inverse_update.h). Every gradient is replaced by its direction V, scaled by the KL clip
// (gradient_preconditioner.h). The caller steps the parameters. Who does and sends what is planned at the start, by
// measured costs (kfac_planner.h).
//
// A step that is left out. Gradients may be cleared without step(), on all ranks alike. In a step that sends factors
// this is collective: each rank says whether it takes the step. If they differ, all throw. Nothing is merged or counted
// before, so that they go on as if the step had never been.
//
// On an accelerator all is queued on the streams where the hooks and step() run. A step waits for the device once: are
// all gradients finite? An update of the inverses waits once or twice more: did all succeed, and were those of other
// ranks ever made? stats() waits, too. What the host decides by travels between CPUs.
//
// Not a number. If a gradient is not finite, step() returns false on every rank, since they share the gradients. It
// forgets the step's sums, and the caller must not step. Sums that overflow on one rank while gradients are finite are
// left out there. Both are counted.
//
// Threads: hooks run in autograd's thread, everything else where the caller is; one lock (reentrancy_guard.h). No call
// needs the GIL, and none may be made with it: a wait that holds the lock takes it to run signal handlers.
// Errors: std::invalid_argument for an option; c10::ValueError for layers on several devices; c10::DistBackendError if
// ranks disagree, at construction; errors of the group as they come.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "core/kfac/kfac_plan.h"
#include "kfac/base/kfac_counters.h"
#include "kfac/base/kfac_options.h"
#include "kfac/comm/kfac_context.h"
#include "kfac/engine/factor_hooks.h"
#include "kfac/engine/kfac_planner.h"
#include "kfac/factors/factor_accumulator.h"
#include "kfac/factors/factor_exchange.h"
#include "kfac/inverses/inverse_update.h"
#include "kfac/precondition/gradient_preconditioner.h"

namespace torchext {

struct KfacStats : KfacCounters {
  std::int64_t factors_left_out = 0;  // not finite on this rank alone
  double clip = 1;                    // nu of the last step
  ExchangeBytes bytes;
  std::int64_t memory_bytes = 0;
};

// A factor in a checkpoint: the mean over ranks, and the inverse in use. Empty tensors: none.
struct FactorState {
  at::Tensor factor;  // packed triangles
  at::Tensor matrix;
  at::Tensor values;
};

class KfacEngine : public std::enable_shared_from_this<KfacEngine> {
 public:
  // Collective if there is a group (null: a single process): checks that all ranks agree, and measures costs. model: of
  // the group in which the model trains, whose failure ends every wait; null where that is none of torchext's.
  KfacEngine(std::vector<KfacLayerSpec> layers, KfacOptions options,
             const c10::intrusive_ptr<c10d::ProcessGroup>& group, std::shared_ptr<GroupHealth> model);

  // A call of the layer's module: its input, and what it returned, whatever other hooks have made of that. False: no
  // gradient of what it returned reaches the weight. Throws std::invalid_argument for a call that is not such a
  // layer's.
  bool forward(int layer, const at::Tensor& input, const std::vector<at::Tensor>& outputs);
  // rates: of each layer, for the clip. others: gradients of parameters outside the layers, checked too and scaled.
  // loss_scale: what the loss was multiplied with; gradient_scale: multiplies the gradients first (1 / loss_scale if
  // nobody has done so). found_inf: the caller knows already. Collective. False: skip this step.
  bool step(const std::vector<double>& rates, const std::vector<at::Tensor>& others, double loss_scale,
            double gradient_scale, bool found_inf);
  // Forgets what a backward pass left that no step() used. Collective in a step that sends factors.
  void discard();

  const KfacOptions& options() const { return context_.options; }
  void setDamping(double damping);
  void setKlClip(std::optional<double> kl_clip);

  const std::vector<KfacLayerSpec>& layers() const { return context_.layers; }
  const std::vector<FactorLayout>& layouts() const { return accumulator_->layouts(); }
  const KfacPlanner& planner() const { return planner_; }
  // How many layers have directions of rows now, in steps that make no inverses.
  std::size_t rowLayers() const;
  KfacStats stats() const;

  // Collective. One entry a factor. load() takes what any world size saved; the caller has compared names and sizes.
  std::vector<FactorState> state();
  void load(const std::vector<FactorState>& state, std::int64_t steps, std::int64_t factor_updates);

 private:
  void mergeFactors(double loss_scale);
  void sendFactors(double loss_scale);
  FactorExchange::Votes agreeOnStep(bool takes_step);
  void updateInverses();
  void planRows();
  bool skipStep();
  void forgetStep();
  void drop(bool sent);
  void changeOptions(const KfacOptions& changed);

  KfacContext context_;
  std::unique_ptr<FactorAccumulator> accumulator_;
  KfacPlanner planner_;
  FactorExchange factors_;
  InverseUpdate inverses_;
  GradientPreconditioner gradients_;
  FactorHooks hooks_;
  at::Tensor row_counts_;  // [ranks, layers], as of the last step that made inverses
};

}  // namespace torchext
