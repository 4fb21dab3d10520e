// PerSamplePlan chooses the Linear layers whose preconditioned gradients are made of all ranks' samples.
//
// The path of the data. In a step that makes inverses see() counts this rank's rows of each layer, and ownCounts()
// tells them to the other ranks, with the vote on the step. At the end of that step choose() gets those of all ranks
// and compares costs, with the same answer everywhere. Each gradient of rows is counted by tried(). A layer whose
// gradients are mostly not those of their rows is left alone from then on.
//
// Threads: the engine's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/ATen.h>

#include "c10d/transport/row_exchange.h"
#include "core/kfac/kfac_plan.h"
#include "kfac/comm/kfac_context.h"
#include "kfac/precondition/preconditioner.h"

namespace torchext {

class PerSamplePlan {
 public:
  // All of them outlive this.
  PerSamplePlan(const KfacContext& context, const core::KfacPlan& plan, const core::KfacPlanInput& input);

  // Whether a layer is one for it, under a plan by which all ranks have its inverses.
  static bool suits(const KfacContext& context, int layer);
  // The same under this plan.
  bool allows(int layer) const;

  void see(int layer, std::int64_t rows) { counts_[static_cast<std::size_t>(layer)].seen += rows; }
  void tried(int layer, bool refused);
  // Drops what see() has counted.
  void forget();
  // [layers]
  at::Tensor ownCounts() const;
  // counts: [ranks, layers], of all ranks' ownCounts(). Those that are to take rows, in the order of the backward pass.
  std::vector<RowExchange::Matrix> choose(const at::Tensor& counts, const Preconditioner& preconditioner) const;

 private:
  // Stands for the rows where a rank says that a layer cannot.
  static constexpr std::int64_t kNoRows = -1;
  struct RowCount {
    std::int64_t seen = 0;  // rows of this rank, in a step that makes inverses
    std::int64_t tried = 0;
    std::int64_t refused = 0;
  };
  double secondsWithoutRows(std::size_t layer, int parts) const;
  core::AlphaBeta costOfRows() const;

  const KfacContext& context_;
  const core::KfacPlan& plan_;
  const core::KfacPlanInput& input_;
  std::vector<RowCount> counts_;  // [layer]
};

}  // namespace torchext
