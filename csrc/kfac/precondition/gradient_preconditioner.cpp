#include "kfac/precondition/gradient_preconditioner.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/base/check.h"
#include "kfac/base/scoped_timer.h"
#include "kfac/comm/kfac_tags.h"
#include "kfac/precondition/kl_clip.h"

namespace torchext {
namespace {

// Whether what is there has enough places for `layers`, and not many more. Alike on all ranks.
bool hasPlaces(const std::vector<RowExchange::Matrix>& there, const std::vector<RowExchange::Matrix>& layers) {
  return std::equal(there.begin(), there.end(), layers.begin(), layers.end(), [](const auto& old, const auto& now) {
    return old.number == now.number && old.places >= now.places && old.places <= 2 * now.places;
  });
}

// Directions that few ranks compute lie together by owner. Those that may stay at home come last.
Preconditioner::Layout layoutOf(const KfacContext& context, const core::KfacPlan& plan,
                                const std::vector<bool>& at_home, bool tiles) {
  std::vector<int> order(context.layers.size());
  std::iota(order.begin(), order.end(), 0);
  const auto key = [&](int layer) {
    const auto i = core::index(layer);
    return plan.workers[i] < context.ranks ? plan.layer_owner[i] : context.ranks + (at_home[i] ? 1 : 0);
  };
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return key(a) < key(b); });
  std::vector<int> parts(context.layers.size(), 1);
  for (std::size_t layer = 0; layer < context.layers.size(); ++layer) {
    if (plan.split_directions && plan.workers[layer] == context.ranks &&
        Preconditioner::splits(context.layers[layer], context.options.form)) {
      parts[layer] = context.ranks;
    }
  }
  return {std::move(order), std::move(parts), tiles};
}

}  // namespace

GradientPreconditioner::GradientPreconditioner(KfacContext& context, const core::KfacPlan& plan,
                                               const core::KfacPlanInput& input, const at::TensorOptions& options,
                                               bool tiles, const std::vector<FactorInverse>& inverses)
    : context_(context),
      plan_(plan),
      inverses_(inverses),
      per_sample_plan_(context, plan, input),
      made_(context.layers.size(), false),
      row_factors_(context.layers.size(), 0),
      row_products_(context.layers.size(), 0) {
  std::vector<bool> at_home;
  at_home.reserve(context_.layers.size());
  for (int layer = 0; layer < context_.layerCount(); ++layer) {
    at_home.push_back(per_sample_plan_.allows(layer));
  }
  Preconditioner::Layout layout = layoutOf(context_, plan_, at_home, tiles);
  preconditioner_ =
      context_.on_device
          ? makeAtenPreconditioner(context_.layers, options, std::move(layout))
          : makeCpuPreconditioner(context_.layers, c10::typeMetaToScalarType(options.dtype()), std::move(layout));
  gradient_exchange_.emplace(plan_, *preconditioner_, at_home, context_.comm.get());
}

bool GradientPreconditioner::keep(int layer, const at::Tensor& input, const at::Tensor& gradient) {
  if (ofRows(layer)) {
    per_sample_->rows().keep(layer, input, gradient);
    return per_sample_->rows().travels();
  }
  if (context_.updatesInverses()) {
    per_sample_plan_.see(layer, input.numel() / context_.layer(layer).inputs());
  }
  return false;
}

void GradientPreconditioner::begin() {
  if (per_sample_) {
    per_sample_->begin();
  }
}

bool GradientPreconditioner::load(double scale, const std::vector<at::Tensor>& others) {
  made_.assign(context_.layers.size(), false);
  if (rowsTravelNow()) {
    const ScopedTimer timer(context_.counters.exchange_wait_seconds);
    per_sample_->leave();
  }
  std::vector<bool> compared;
  for (int layer = 0; per_sample_ && layer < context_.layerCount(); ++layer) {
    compared.push_back(ofRows(layer));
  }
  return preconditioner_->collect(scale, others, compared);
}

void GradientPreconditioner::make(int layer) {
  if (made_[core::index(layer)]) {
    return;
  }
  made_[core::index(layer)] = true;
  if (!plan_.preconditions(context_.rank, layer) || makeOfRows(layer)) {
    return;
  }
  const ScopedTimer timer(context_.counters.precondition_seconds);
  const std::size_t outputs = context_.firstFactor(layer);
  const auto make_part = [&](int part) {
    preconditioner_->precondition(layer, part, inverses_[outputs + 1], inverses_[outputs], context_.options.form,
                                  context_.options.damping);
  };
  const int parts = preconditioner_->parts(layer);
  if (parts > 1 && ofRows(layer) && rowsReplaceShares()) {  // refused: each rank makes all of it, and sends none
    for (int part = 0; part < parts; ++part) {
      make_part(part);
    }
  } else {
    make_part(parts > 1 ? context_.rank : 0);
  }
}

void GradientPreconditioner::makeRest() {
  for (int layer = 0; layer < context_.layerCount(); ++layer) {
    make(layer);
  }
}

void GradientPreconditioner::exchange() {
  {
    const ScopedTimer timer(context_.counters.distribute_seconds);
    gradient_exchange_->run(/*with_those_at_home=*/!rowsReplaceShares());
  }
  if (rowsTravelNow()) {
    takeWritten();
    const ScopedTimer timer(context_.counters.exchange_wait_seconds);
    endRows();
  }
}

void GradientPreconditioner::write(const std::vector<double>& rates) {
  {
    const ScopedTimer timer(context_.counters.precondition_seconds);
    context_.counters.row_directions_ahead += preconditioner_->write(rates, context_.options.kl_clip);
  }
  if (rowsTravelNow()) {
    foreseeScaling(rates);
  }
}

void GradientPreconditioner::skip() {
  if (rowsTravelNow()) {
    endRows();
  }
}

void GradientPreconditioner::forget() {
  per_sample_plan_.forget();
  if (per_sample_) {
    per_sample_->rows().forget();
  }
}

// Whether ranks make no shares of Linear layers' directions in this step, because all of these are of rows. Alike on
// all ranks, whatever becomes of the rows.
bool GradientPreconditioner::rowsReplaceShares() const {
  bool any = false;
  for (int layer = 0; layer < context_.layerCount(); ++layer) {
    if (per_sample_plan_.allows(layer) && preconditioner_->parts(layer) > 1) {
      if (!ofRows(layer)) {
        return false;
      }
      any = true;
    }
  }
  return any;
}

// Whether this rank's direction of a layer is that of rows, which are all that its gradient is made of.
bool GradientPreconditioner::makeOfRows(int layer) {
  if (!ofRows(layer) || rows_void_ || !preconditioner_->active(layer)) {
    return false;
  }
  KfacCounters& counters = context_.counters;
  PerSampleProduct made;
  {
    const ScopedTimer timer(per_sample_->rows().travels() ? counters.exchange_wait_seconds
                                                          : counters.precondition_seconds);
    made = per_sample_->made(layer);
  }
  const ScopedTimer timer(counters.precondition_seconds);
  const std::optional<double> factor = preconditioner_->takeRows(layer, made, 1.0 / context_.ranks);
  per_sample_plan_.tried(layer, /*refused=*/!factor);
  counters.row_directions += factor ? 1 : 0;
  counters.row_directions_refused += factor ? 0 : 1;
  row_factors_[core::index(layer)] = factor.value_or(0);
  row_products_[core::index(layer)] = factor.value_or(0) * factor.value_or(0) * made.product;
  return factor.has_value();
}

void GradientPreconditioner::takeWritten() {
  const ScopedTimer timer(context_.counters.precondition_seconds);
  for (const RowExchange::Matrix& layer : per_sample_->rows().matrices()) {
    preconditioner_->takeWritten(layer.number, per_sample_->written(layer.number));
  }
}

void GradientPreconditioner::endRows() {
  per_sample_->next();
  rows_void_ = false;
}

// At the end of a step of rows: will those to come multiply directions with what can be known before them?
void GradientPreconditioner::foreseeScaling(const std::vector<double>& rates) {
  const bool all = std::all_of(row_factors_.begin(), row_factors_.end(), [](double factor) { return factor != 0; });
  PerSamplePreconditioner::Scaling scaling{rates, row_factors_, context_.options.kl_clip};
  row_factors_.assign(context_.layers.size(), 0);
  if (!all) {
    per_sample_->foresee(std::nullopt);
    return;
  }
  const bool constant = row_scaling_ && row_scaling_->factors == scaling.factors &&
                        klClip(row_scaling_->kl_clip, row_scaling_->rates, row_products_) == preconditioner_->clip();
  per_sample_->foresee(constant ? std::optional(scaling) : std::nullopt);
  row_scaling_ = std::move(scaling);
}

void GradientPreconditioner::planRows(const at::Tensor& counts) {
  per_sample_plan_.forget();
  std::vector<RowExchange::Matrix> layers = per_sample_plan_.choose(counts, *preconditioner_);
  if (layers.empty()) {
    per_sample_.reset();
    return;
  }
  if (!per_sample_ || !hasPlaces(per_sample_->rows().matrices(), layers)) {
    per_sample_ = std::make_unique<PerSamplePreconditioner>(std::move(layers), preconditioner_->options(),
                                                            context_.comm.get(), kfac_tags::kRows);
    row_scaling_.reset();
  }
  for (const RowExchange::Matrix& layer : per_sample_->rows().matrices()) {
    per_sample_->rows().expect(layer.number, counts[context_.rank][layer.number].item<std::int64_t>());
  }
  prepareRows();
}

void GradientPreconditioner::inversesChanged() {
  rows_void_ = true;  // what was made of those that have left
  prepareRows();
}

void GradientPreconditioner::prepareRows() {
  for (int layer = 0; per_sample_ && layer < context_.layerCount(); ++layer) {
    if (per_sample_->rows().has(layer)) {
      const KfacLayerSpec& spec = context_.layer(layer);
      const std::size_t outputs = context_.firstFactor(layer);
      per_sample_->prepare(layer, {inverses_[outputs + 1], inverses_[outputs], spec.bias && spec.bias->requires_grad(),
                                   preconditioner_->tiled(layer)});
    }
  }
}

}  // namespace torchext
