// Directions of Linear layers that are made of the rows of all ranks' batches (per_sample_preconditioner.h), in all
// steps but those that make inverses. In those every rank says how many rows its layers have had, and all choose alike
// for the steps to come.
#include <algorithm>

#include "core/base/check.h"
#include "core/kfac/per_sample_choice.h"
#include "kfac/base/scoped_timer.h"
#include "kfac/comm/kfac_tags.h"
#include "kfac/engine/kfac_engine.h"
#include "kfac/precondition/kl_clip.h"

namespace torchext {
namespace {

// A layer whose gradients are not those of its rows in most of so many steps never has such ones again.
constexpr std::int64_t kTries = 8;
// Of rows that are kept for a step, of all ranks: beyond it they are no longer small beside a model.
constexpr std::size_t kMostBytes = std::size_t{256} << 20;

// Whether what is there has enough places for `layers`, and not many more. Alike on all ranks.
bool hasPlaces(const std::vector<PerSampleExchange::Layer>& there,
               const std::vector<PerSampleExchange::Layer>& layers) {
  return std::equal(there.begin(), there.end(), layers.begin(), layers.end(), [](const auto& old, const auto& now) {
    return old.number == now.number && old.places >= now.places && old.places <= 2 * now.places;
  });
}

}  // namespace

// Under a plan by which all ranks have its inverses.
bool KfacEngine::suitsRows(int layer) const {
  return options_.gather_rows.value_or(true) && !device_path_ && options_.form == InverseForm::kInverse &&
         options_.inverse_update_steps > 1 && layers_[core::index(layer)].kind == KfacLayerSpec::Kind::kLinear;
}

bool KfacEngine::mayTakeRows(int layer) const {
  return suitsRows(layer) && plan_.strategy != core::KfacStrategy::kDkfac &&
         plan_.workers[core::index(layer)] == ranks_;
}

bool KfacEngine::takesRows(int layer) const { return rows_ && !updatesInverses() && rows_->has(layer); }

// Whether ranks make no shares of Linear layers' directions in this step, because all of these are of rows. Alike on
// all ranks, whatever becomes of the rows.
bool KfacEngine::rowsReplaceShares() const {
  bool any = false;
  for (int layer = 0; layer < static_cast<int>(layers_.size()); ++layer) {
    if (mayTakeRows(layer) && preconditioner_->parts(layer) > 1) {
      if (!takesRows(layer)) {
        return false;
      }
      any = true;
    }
  }
  return any;
}

void KfacEngine::keepRows(int layer, const at::Tensor& input, const at::Tensor& gradient) {
  if (takesRows(layer)) {
    rows_->keep(layer, input, gradient);
    if (rows_->travels()) {
      callAtEndOfPass();
    }
  } else if (updatesInverses()) {
    row_counts_[core::index(layer)].seen += input.numel() / layers_[core::index(layer)].inputs();
  }
}

void KfacEngine::forgetRows() {
  for (RowCount& count : row_counts_) {
    count.seen = 0;
  }
  if (rows_) {
    rows_->forget();
  }
}

void KfacEngine::endRows() {
  rows_->next();
  rows_void_ = false;
}

std::size_t KfacEngine::rowLayers() const {
  const Lock lock(mutex_);
  return rows_ ? rows_->layers().size() : 0;
}

// Whether this rank's direction of a layer is that of rows, which are all that its gradient is made of.
bool KfacEngine::takeRows(int layer) {
  if (!takesRows(layer) || rows_void_ || !preconditioner_->active(layer)) {
    return false;
  }
  PerSampleProduct made;
  {
    const ScopedTimer timer(rows_->travels() ? stats_.exchange_wait_seconds : stats_.precondition_seconds);
    made = rows_->made(layer);
  }
  const ScopedTimer timer(stats_.precondition_seconds);
  const std::optional<double> factor = preconditioner_->takeRows(layer, made, 1.0 / ranks_);
  RowCount& count = row_counts_[core::index(layer)];
  ++count.tried;
  count.refused += factor ? 0 : 1;
  stats_.row_directions += factor ? 1 : 0;
  stats_.row_directions_refused += factor ? 0 : 1;
  row_factors_[core::index(layer)] = factor.value_or(0);
  row_products_[core::index(layer)] = factor.value_or(0) * factor.value_or(0) * made.product;
  return factor.has_value();
}

void KfacEngine::takeWritten() {
  const ScopedTimer timer(stats_.precondition_seconds);
  for (const PerSampleExchange::Layer& layer : rows_->layers()) {
    preconditioner_->takeWritten(layer.number, rows_->written(layer.number));
  }
}

// At the end of a step of rows: will those to come multiply directions with what can be known before them?
void KfacEngine::foreseeRows(const std::vector<double>& rates) {
  const bool all = std::all_of(row_factors_.begin(), row_factors_.end(), [](double factor) { return factor != 0; });
  PerSamplePreconditioner::Scaling scaling{rates, row_factors_, options_.kl_clip};
  row_factors_.assign(layers_.size(), 0);
  if (!all) {
    rows_->foresee(std::nullopt);
    return;
  }
  const bool constant = row_scaling_ && row_scaling_->factors == scaling.factors &&
                        klClip(row_scaling_->kl_clip, row_scaling_->rates, row_products_) == preconditioner_->clip();
  rows_->foresee(constant ? std::optional(scaling) : std::nullopt);
  row_scaling_ = std::move(scaling);
}

std::vector<bool> KfacEngine::ofRows() const {
  std::vector<bool> layers;
  for (int layer = 0; rows_ && layer < static_cast<int>(layers_.size()); ++layer) {
    layers.push_back(takesRows(layer));
  }
  return layers;
}

// Whenever there are other inverses, or other layers.
void KfacEngine::prepareRows() {
  for (int layer = 0; rows_ && layer < static_cast<int>(layers_.size()); ++layer) {
    if (rows_->has(layer)) {
      const KfacLayerSpec& spec = layers_[core::index(layer)];
      const std::size_t outputs = 2 * (layers_.size() - 1 - core::index(layer));
      rows_->prepare(layer, {inverses_[outputs + 1], inverses_[outputs], spec.bias && spec.bias->requires_grad(),
                             preconditioner_->tiled(layer)});
    }
  }
}

// Of a step that makes inverses: what every rank tells the others of each layer. It goes with the vote on the step.
at::Tensor KfacEngine::ownRowCounts() const {
  std::vector<std::int64_t> counts;
  for (int layer = 0; layer < static_cast<int>(layers_.size()); ++layer) {
    const RowCount& rows = row_counts_[core::index(layer)];
    const bool in_vain = rows.tried >= kTries && 2 * rows.refused > rows.tried;
    counts.push_back(!mayTakeRows(layer) || in_vain ? kNoRows : rows.seen);
  }
  return at::tensor(counts, at::kLong);
}

// At the end of a step that made inverses. counts: [ranks, layers].
void KfacEngine::planRows(const at::Tensor& counts) {
  for (RowCount& count : row_counts_) {
    count.seen = 0;
  }
  std::vector<PerSampleExchange::Layer> layers = chooseRowLayers(counts);
  if (layers.empty()) {
    rows_.reset();
    return;
  }
  if (!rows_ || !hasPlaces(rows_->layers(), layers)) {
    rows_ = std::make_unique<PerSamplePreconditioner>(std::move(layers), accumulator_->options(), exchange_.get(),
                                                      kfac_tags::kRows);
    row_scaling_.reset();
  }
  for (const PerSampleExchange::Layer& layer : rows_->layers()) {
    rows_->expect(layer.number, counts[rank_][layer.number].item<std::int64_t>());
  }
  prepareRows();
}

// counts: [ranks, layers], rows in a step; kNoRows where a rank says that a layer cannot. Those that are to take rows,
// in the order of the backward pass.
std::vector<PerSampleExchange::Layer> KfacEngine::chooseRowLayers(const at::Tensor& counts) const {
  const auto width = c10::elementSize(accumulator_->type());
  const auto count_of = counts.accessor<std::int64_t, 2>();
  std::vector<core::RowLayer> candidates;
  std::vector<std::int64_t> places;
  std::size_t bytes = 0;
  for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
    const KfacLayerSpec& spec = layers_[layer];
    std::int64_t sum = 0;
    std::int64_t most = 0;
    bool can = true;
    for (int rank = 0; rank < ranks_; ++rank) {
      const std::int64_t rows = count_of[rank][static_cast<std::int64_t>(layer)];
      can = can && rows != kNoRows;
      sum += rows;
      most = std::max(most, rows);
    }
    places.push_back(most);
    const auto of_rank =
        static_cast<std::size_t>(most) * static_cast<std::size_t>(spec.outputs() + spec.inputs()) * width;
    can = can && bytes + of_rank * core::index(ranks_) <= kMostBytes;
    bytes += can ? of_rank * core::index(ranks_) : 0;
    candidates.push_back({static_cast<std::size_t>(spec.outputs()), static_cast<std::size_t>(spec.inputDim()),
                          can ? static_cast<std::size_t>(sum) : 0, of_rank, input_.precondition[layer],
                          secondsWithoutRows(layer),
                          preconditioner_->parts(static_cast<int>(layer)) > 1 && mayTakeRows(static_cast<int>(layer))});
  }
  const std::vector<bool> pays = core::chooseRows(candidates, costOfRows(), exchange_ && !throughMemory());
  const bool asked = options_.gather_rows == true;
  const bool all_together = std::none_of(candidates.begin(), candidates.end(),
                                         [](const core::RowLayer& layer) { return layer.together && layer.rows == 0; });
  std::vector<PerSampleExchange::Layer> chosen;
  for (std::size_t layer = layers_.size(); layer-- > 0;) {
    if (asked ? candidates[layer].rows > 0 && (!candidates[layer].together || all_together) : pays[layer]) {
      chosen.push_back({static_cast<int>(layer), layers_[layer].inputs(), layers_[layer].outputs(), places[layer]});
    }
  }
  return chosen;
}

// What a layer's direction takes a rank otherwise: all of it, or a share, and bringing shares together.
double KfacEngine::secondsWithoutRows(std::size_t layer) const {
  const int parts = preconditioner_->parts(static_cast<int>(layer));
  const core::KfacCosts& costs = input_.costs;
  const double a_byte = parts == 1 ? 0 : costs.sharing ? costs.sharing->beta : costs.broadcast.beta;
  return input_.precondition[layer] / parts + a_byte * static_cast<double>(input_.gradient_bytes[layer]);
}

// Of the bytes of one rank until all ranks have those of all.
core::AlphaBeta KfacEngine::costOfRows() const {
  const core::KfacCosts& costs = input_.costs;
  if (!exchange_) {
    return {};
  }
  if (costs.sharing) {
    return {costs.sharing->alpha, ranks_ * costs.sharing->beta};
  }
  // An all-reduce of n bytes gathers n / ranks of each, after it has scattered as much.
  return {costs.all_reduce.alpha / 2, costs.all_reduce.beta * ranks_ / 2};
}

}  // namespace torchext
