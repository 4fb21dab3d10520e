// What KfacEngine does at its start: options compared, the plan made (of costs: kfac_engine_costs.cpp) and its buffers
// laid out.
#include <algorithm>
#include <numeric>

#include "core/base/check.h"
#include "kfac/engine/kfac_engine.h"

namespace torchext {
namespace {

// Ready times are taken from the last of so many steps that send factors, then buckets are planned for good.
constexpr int kProfiledSteps = 3;

std::vector<std::string> describeLayers(const std::vector<KfacLayerSpec>& layers) {
  std::vector<std::string> texts;
  texts.reserve(layers.size());
  for (const auto& layer : layers) {
    texts.push_back(c10::str(layer.name.empty() ? "the model itself" : layer.name, ", weight ", layer.weight.sizes(),
                             layer.bias ? " and bias" : "", ", groups ", layer.groups));
  }
  return texts;
}

at::ScalarType typeOf(const std::vector<KfacLayerSpec>& layers) {
  const bool doubles = std::any_of(layers.begin(), layers.end(),
                                   [](const auto& layer) { return layer.weight.scalar_type() == at::kDouble; });
  return doubles ? at::kDouble : at::kFloat;
}

at::Device deviceOf(const std::vector<KfacLayerSpec>& layers) {
  TORCH_CHECK_VALUE(!layers.empty(), "torchext.optim: no layers");
  const at::Device device = layers.front().weight.device();
  for (const auto& layer : layers) {
    TORCH_CHECK_VALUE(layer.weight.device() == device, "torchext.optim: ", layers.front().name, " is on ", device, ", ",
                      layer.name, " on ", layer.weight.device(), "; all layers must be on one device");
  }
  return device;
}

}  // namespace

KfacEngine::KfacEngine(std::vector<KfacLayerSpec> layers, KfacOptions options,
                       const c10::intrusive_ptr<c10d::ProcessGroup>& group, std::shared_ptr<GroupHealth> model)
    : layers_(std::move(layers)),
      options_((options.validate(), std::move(options))),
      device_(deviceOf(layers_)),
      device_path_(options_.queued || !device_.is_cpu()),
      exchange_(group && group->getSize() > 1 ? std::make_unique<KfacExchange>(group, std::move(model)) : nullptr),
      rank_(exchange_ ? exchange_->rank() : 0),
      ranks_(exchange_ ? exchange_->size() : 1),
      accumulator_(device_path_ ? makeAtenAccumulator(layers_, at::TensorOptions(typeOf(layers_)).device(device_),
                                                      options_.scaling)
                                : makeCpuAccumulator(layers_, typeOf(layers_), options_.scaling)),
      row_counts_(layers_.size()),
      row_factors_(layers_.size(), 0),
      row_products_(layers_.size(), 0),
      inverses_(accumulator_->layouts().size()),
      prepared_(accumulator_->layouts().size(), false),
      calls_(layers_.size()),
      ready_(device_, accumulator_->layouts().size()) {
  if (exchange_) {
    exchange_->agree({
        {"layers", describeLayers(layers_)},
        {"factor_update_steps", options_.factor_update_steps},
        {"inverse_update_steps", options_.inverse_update_steps},
        {"strategy", options_.strategy},
        {"method", core::enumName(kMethodNames, "method", options_.form)},
        {"factor_scaling", core::enumName(kScalingNames, "factor_scaling", options_.scaling)},
        {"factor_decay", options_.decay},
        {"martens_decay", options_.martens_decay},
        {"damping", options_.damping},
        {"kl_clip", options_.kl_clip},
        {"worker_fraction", options_.worker_fraction},
        {"bucket_cap_mb", options_.bucket_cap_mb},
        {"split_directions", options_.split_directions},
        {"direction_precision", core::enumName(kPrecisionNames, "direction_precision", options_.precision)},
        {"gather_rows", options_.gather_rows},
        {"shared_memory", options_.shared_memory},
        {"the type of the device", c10::DeviceTypeName(device_.type(), /*lower_case=*/true)},
    });
    if (options_.shared_memory && !device_path_) {
      exchange_->shareMemory();
    }
  }
  tiles_ = allHaveTiles();
  measureCosts();
  makePlan();
}

void KfacEngine::makePlan() {
  const auto& layouts = accumulator_->layouts();
  const auto width = c10::elementSize(accumulator_->type());
  for (const FactorLayout& layout : layouts) {
    input_.tasks.push_back({layout.layer, static_cast<std::size_t>(layout.dim), static_cast<std::size_t>(layout.count),
                            static_cast<std::size_t>(layout.size) * width,
                            static_cast<std::size_t>(inverseElements(layout, options_.form)) * width, layout.diagonal});
  }
  for (const KfacLayerSpec& spec : layers_) {
    input_.gradient_bytes.push_back(static_cast<std::size_t>(spec.groups * spec.outputs() * spec.inputDim()) * width);
  }
  // Through memory rows come in step(), where their directions are not ahead of anything.
  for (int layer = 0; exchange_ && !throughMemory() && layer < static_cast<int>(layers_.size()); ++layer) {
    input_.of_rows.push_back(suitsRows(layer));
  }
  input_.ranks = ranks_;
  input_.steps_per_inverse = options_.inverse_update_steps;
  input_.worker_fraction = options_.worker_fraction;
  input_.bucket_cap_bytes = static_cast<std::size_t>(options_.bucket_cap_mb * (1 << 20));
  plan_ = core::makeKfacPlan(core::parseKfacStrategy(options_.strategy), input_);
  // Who asks for rows has no shares without asking for them.
  const bool split = options_.split_directions.value_or(plan_.split_directions && options_.gather_rows != true);
  plan_.split_directions = split && ranks_ > 1;

  // Directions that few ranks compute lie together by owner. Those that may stay at home come last.
  std::vector<int> order(layers_.size());
  std::iota(order.begin(), order.end(), 0);
  const auto key = [&](int layer) {
    const auto i = static_cast<std::size_t>(layer);
    return plan_.workers[i] < ranks_ ? plan_.layer_owner[i] : ranks_ + (mayTakeRows(layer) ? 1 : 0);
  };
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return key(a) < key(b); });
  std::vector<int> parts(layers_.size(), 1);
  for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
    if (plan_.split_directions && plan_.workers[layer] == ranks_ &&
        Preconditioner::splits(layers_[layer], options_.form)) {
      parts[layer] = ranks_;
    }
  }
  Preconditioner::Layout layout{std::move(order), std::move(parts), tiles_};
  preconditioner_ = device_path_ ? makeAtenPreconditioner(layers_, accumulator_->options(), std::move(layout))
                                 : makeCpuPreconditioner(layers_, accumulator_->type(), std::move(layout));
  std::vector<bool> at_home;
  at_home.reserve(layers_.size());
  for (int layer = 0; layer < static_cast<int>(layers_.size()); ++layer) {
    at_home.push_back(mayTakeRows(layer));
  }
  made_.assign(layers_.size(), false);
  gradient_exchange_ =
      std::make_unique<GradientExchange>(plan_, *preconditioner_, at_home, exchange_.get(), device_path_);
  inverse_exchange_ = std::make_unique<InverseExchange>(plan_, *accumulator_, options_.form, exchange_.get());
  if (exchange_) {
    payload_ = at::empty({accumulator_->elements()}, accumulator_->options());
  }
  inverter_ = {accumulator_, exchange_ ? payload_ : accumulator_->running(), {}, options_.form, device_path_};
  for (const core::FactorPlan& factor : plan_.factors) {
    const bool summed = exchange_ && factor.exchange != core::FactorExchange::kOwnersOwn;
    inverter_.divisors.push_back(summed ? ranks_ : 1);
  }
  share_place_.assign(layouts.size(), -1);
  const bool added_here = device_.is_cpu() && !throughMemory();
  std::int64_t owned = 0;
  for (std::size_t i = 0; i < layouts.size(); ++i) {
    const core::FactorPlan& factor = plan_.factors[i];
    if (added_here && factor.exchange == core::FactorExchange::kReduceToOwner && factor.owner == rank_) {
      share_place_[i] = owned;
      owned += layouts[i].size;
    }
  }
  if (owned > 0) {
    shares_ = at::empty({owned * (ranks_ - 1)}, accumulator_->options());
  }
}

// After some profiled steps: buckets by the ready times that rank 0 saw.
void KfacEngine::replanBuckets() {
  if (!exchange_ || profiled_ != kProfiledSteps || !input_.ready.empty() ||
      plan_.strategy == core::KfacStrategy::kDkfac) {
    return;
  }
  input_.ready = exchange_->fromRankZero(ready_.seconds());
  plan_.fusion_ends = core::makeKfacPlan(plan_.strategy, input_).fusion_ends;
}

}  // namespace torchext
