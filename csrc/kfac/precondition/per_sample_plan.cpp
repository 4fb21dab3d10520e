#include "kfac/precondition/per_sample_plan.h"

#include <algorithm>

#include "core/base/check.h"
#include "core/kfac/per_sample_choice.h"

namespace torchext {
namespace {

// A layer whose gradients are not those of its rows in most of so many steps never has such ones again.
constexpr std::int64_t kTries = 8;
// Of rows that are kept for a step, of all ranks: beyond it they are no longer small beside a model.
constexpr std::size_t kMostBytes = std::size_t{256} << 20;

}  // namespace

PerSamplePlan::PerSamplePlan(const KfacContext& context, const core::KfacPlan& plan, const core::KfacPlanInput& input)
    : context_(context), plan_(plan), input_(input), counts_(context.layers.size()) {}

bool PerSamplePlan::suits(const KfacContext& context, int layer) {
  const KfacOptions& options = context.options;
  return options.gather_rows.value_or(true) && !context.on_device && options.form == InverseForm::kInverse &&
         options.inverse_update_steps > 1 && context.layer(layer).kind == KfacLayerSpec::Kind::kLinear;
}

bool PerSamplePlan::allows(int layer) const {
  return suits(context_, layer) && plan_.strategy != core::KfacStrategy::kDkfac &&
         plan_.workers[core::index(layer)] == context_.ranks;
}

void PerSamplePlan::tried(int layer, bool refused) {
  RowCount& count = counts_[core::index(layer)];
  ++count.tried;
  count.refused += refused ? 1 : 0;
}

void PerSamplePlan::forget() {
  for (RowCount& count : counts_) {
    count.seen = 0;
  }
}

at::Tensor PerSamplePlan::ownCounts() const {
  std::vector<std::int64_t> counts;
  for (int layer = 0; layer < context_.layerCount(); ++layer) {
    const RowCount& rows = counts_[core::index(layer)];
    const bool in_vain = rows.tried >= kTries && 2 * rows.refused > rows.tried;
    counts.push_back(!allows(layer) || in_vain ? kNoRows : rows.seen);
  }
  return at::tensor(counts, at::kLong);
}

std::vector<RowExchange::Matrix> PerSamplePlan::choose(const at::Tensor& counts,
                                                       const Preconditioner& preconditioner) const {
  const auto width = preconditioner.options().dtype().itemsize();
  const auto count_of = counts.accessor<std::int64_t, 2>();
  std::vector<core::RowLayer> candidates;
  std::vector<std::int64_t> places;
  std::size_t bytes = 0;
  for (int layer = 0; layer < context_.layerCount(); ++layer) {
    const KfacLayerSpec& spec = context_.layer(layer);
    std::int64_t sum = 0;
    std::int64_t most = 0;
    bool can = true;
    for (int rank = 0; rank < context_.ranks; ++rank) {
      const std::int64_t rows = count_of[rank][layer];
      can = can && rows != kNoRows;
      sum += rows;
      most = std::max(most, rows);
    }
    places.push_back(most);
    const auto of_rank =
        static_cast<std::size_t>(most) * static_cast<std::size_t>(spec.outputs() + spec.inputs()) * width;
    can = can && bytes + of_rank * core::index(context_.ranks) <= kMostBytes;
    bytes += can ? of_rank * core::index(context_.ranks) : 0;
    const int parts = preconditioner.parts(layer);
    candidates.push_back({static_cast<std::size_t>(spec.outputs()), static_cast<std::size_t>(spec.inputDim()),
                          can ? static_cast<std::size_t>(sum) : 0, of_rank, input_.precondition[core::index(layer)],
                          secondsWithoutRows(core::index(layer), parts), parts > 1 && allows(layer)});
  }
  const std::vector<bool> pays = core::chooseRows(candidates, costOfRows(), context_.comm && context_.overlaps());
  const bool asked = context_.options.gather_rows == true;
  const bool all_together = std::none_of(candidates.begin(), candidates.end(),
                                         [](const core::RowLayer& layer) { return layer.together && layer.rows == 0; });
  std::vector<RowExchange::Matrix> chosen;
  for (std::size_t layer = candidates.size(); layer-- > 0;) {
    if (asked ? candidates[layer].rows > 0 && (!candidates[layer].together || all_together) : pays[layer]) {
      const KfacLayerSpec& spec = context_.layers[layer];
      chosen.push_back({static_cast<int>(layer), spec.inputs(), spec.outputs(), places[layer]});
    }
  }
  return chosen;
}

// What a layer's direction takes a rank otherwise: all of it, or a share, and bringing shares together.
double PerSamplePlan::secondsWithoutRows(std::size_t layer, int parts) const {
  const core::KfacCosts& costs = input_.costs;
  const double a_byte = parts == 1 ? 0 : costs.sharing ? costs.sharing->beta : costs.broadcast.beta;
  return input_.precondition[layer] / parts + a_byte * static_cast<double>(input_.gradient_bytes[layer]);
}

// Of the bytes of one rank until all ranks have those of all.
core::AlphaBeta PerSamplePlan::costOfRows() const {
  const core::KfacCosts& costs = input_.costs;
  if (!context_.comm) {
    return {};
  }
  if (costs.sharing) {
    return {costs.sharing->alpha, context_.ranks * costs.sharing->beta};
  }
  // An all-reduce of n bytes gathers n / ranks of each, after it has scattered as much.
  return {costs.all_reduce.alpha / 2, costs.all_reduce.beta * context_.ranks / 2};
}

}  // namespace torchext
