// KfacPlanner decides who computes and sends what, by costs that it measures when the engine starts.
//
// The path of the data. The constructor times inversions, the group's transfers and products of matrices, all of them
// on all ranks at once. Every rank must come to the same plan (core/kfac/kfac_plan.h), so times that differ from rank
// to rank are brought to one number.
//
// Threads: the engine's lock. Errors of the group as they come.
#pragma once

#include <functional>

#include "core/kfac/kfac_plan.h"
#include "kfac/comm/kfac_context.h"
#include "kfac/factors/factor_accumulator.h"

namespace torchext {

class KfacPlanner {
 public:
  // Collective. Both outlive this.
  KfacPlanner(KfacContext& context, const FactorAccumulator& accumulator);

  const core::KfacPlan& plan() const { return plan_; }
  // What the plan was made by.
  const core::KfacPlanInput& input() const { return input_; }
  core::KfacPrediction prediction() const { return core::predictKfac(plan_, input_); }
  // Whether directions of larger layers are made on the processor's matrix tiles; alike on all ranks.
  bool usesTiles() const { return tiles_; }

 private:
  bool allHaveTiles() const;
  void describeModel();
  void measureInversions();
  void measureProducts();
  double secondsOf(const std::function<int()>& work, double window, int most) const;
  double secondsOfProduct(bool tiles) const;
  double typicalSeconds(double seconds) const;

  KfacContext& context_;
  const FactorAccumulator& accumulator_;
  bool tiles_;
  core::KfacPlanInput input_;
  core::KfacPlan plan_;
};

}  // namespace torchext
