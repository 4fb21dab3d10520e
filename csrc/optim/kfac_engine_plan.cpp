// What KfacEngine does at its start: options compared, costs measured, the plan made and its buffers laid out.
#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "core/check.h"
#include "optim/factor_batch.h"
#include "optim/kfac_engine.h"
#include "optim/matrix_product.h"
#include "optim/tiled_direction.h"
#include "optim/timed.h"

namespace torchext {
namespace {

// Ready times are taken from the last of so many steps that send factors, then runs are planned for good.
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

// As directions are made (kfac_directions_cpu.cpp).
template <class T>
void multiplySquares(const at::Tensor& square, at::Tensor& result) {
  const std::int64_t size = square.size(0);
  const T* data = square.const_data_ptr<T>();
  multiply(false, true, size, size, size, data, size, data, size, T(0), result.mutable_data_ptr<T>(), size);
}

// Of full rank and well conditioned: a decomposition of fewer ranks would be faster than those to come.
at::Tensor exampleFactor(std::int64_t dim, const at::Generator& generator) {
  const at::Tensor noise = at::rand({dim, dim}, generator);
  const double radius = 2 * std::sqrt(static_cast<double>(dim) / 6);  // of the symmetric part's spectrum (Wigner)
  return (noise + noise.t()).sub_(1).div_(radius).add_(at::eye(dim), 2);
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
                       const c10::intrusive_ptr<c10d::ProcessGroup>& group)
    : layers_(std::move(layers)),
      options_((options.validate(), std::move(options))),
      device_(deviceOf(layers_)),
      queued_(options_.queued || !device_.is_cpu()),
      exchange_(group && group->getSize() > 1 ? std::make_unique<KfacExchange>(group) : nullptr),
      rank_(exchange_ ? exchange_->rank() : 0),
      ranks_(exchange_ ? exchange_->size() : 1),
      statistics_(
          queued_ ? makeQueuedStatistics(layers_, at::TensorOptions(typeOf(layers_)).device(device_), options_.scaling)
                  : makeCpuStatistics(layers_, typeOf(layers_), options_.scaling)),
      inverses_(statistics_->slots().size()),
      prepared_(statistics_->slots().size(), false),
      row_counts_(layers_.size()),
      calls_(layers_.size()),
      ready_(device_, statistics_->slots().size()) {
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
        {"max_run_mb", options_.max_run_mb},
        {"exchange_always", options_.exchange_always},
        {"split_directions", options_.split_directions},
        {"direction_precision", core::enumName(kPrecisionNames, "direction_precision", options_.precision)},
        {"early_directions", options_.early_directions},
        {"gather_rows", options_.gather_rows},
        {"shared_memory", options_.shared_memory},
        {"the type of the device", c10::DeviceTypeName(device_.type(), /*lower_case=*/true)},
    });
    if (options_.shared_memory && !queued_) {
      exchange_->shareMemory();
    }
  }
  if (options_.early_directions) {
    early_ = std::make_unique<EarlyDirections>(layers_, statistics_->options());
  }
  tiles_ = allHaveTiles();
  measureCosts();
  makePlan();
}

// Replicas stay equal only where all ranks round alike.
bool KfacEngine::allHaveTiles() const {
  const bool here = options_.precision == DirectionPrecision::kHigh && !queued_ && statistics_->type() == at::kFloat &&
                    std::any_of(layers_.begin(), layers_.end(),
                                [&](const auto& spec) { return KfacDirections::usesTiles(spec, options_.form); }) &&
                    TiledDirection::available();
  return exchange_ ? exchange_->mean(here ? 1 : 0) > 1 - 0.5 / ranks_ : here;
}

void KfacEngine::measureCosts() {
  // Sizes of the model's own factors, up to one that takes some milliseconds; beyond it the fit's cubic holds.
  constexpr std::int64_t kLargest = 512;
  constexpr int kRepeats = 3;
  constexpr double kEnough = 2e-3;  // seconds for one size: the script waits, and what takes longer varies less
  std::set<std::int64_t> dims{16, 64};
  for (const FactorSlot& slot : statistics_->slots()) {
    if (!slot.diagonal) {
      dims.insert(std::min(slot.dim, kLargest));
    }
  }
  while (dims.size() > 5) {
    dims.erase(std::next(dims.begin(), 2));  // keeps the largest ones, which weigh most
  }
  if (!exchange_) {
    dims = {16, 64};
  }
  std::vector<core::InversionSample> samples;
  std::vector<double> seconds;
  at::Generator generator = at::detail::createCPUGenerator(/*seed_val=*/1);  // the script's numbers stay its own
  for (const std::int64_t dim : dims) {
    const at::Tensor batch = exampleFactor(dim, generator).to(statistics_->options()).unsqueeze(0);
    const at::Tensor damping = at::full({1}, 0.1, batch.options());
    InverseFailures ignored;
    double spent = 0;
    int repeats = 0;
    if (exchange_) {
      exchange_->mean(0);  // all begin together, as they will: those that share a processor are in each other's way
    }
    for (; repeats < kRepeats && spent < kEnough; ++repeats) {
      waitForDevice(device_);
      const double start = monotonicSeconds();
      if (queued_) {
        invertFactors({FactorToInvert{batch, damping}}, options_.form, ignored);
      } else if (options_.form == InverseForm::kInverse) {
        invertFactor(batch.clone(), damping, ignored);
      } else {
        decomposeFactor(batch, ignored);
      }
      waitForDevice(device_);
      spent += monotonicSeconds() - start;
    }
    samples.push_back({static_cast<std::size_t>(dim), 0});
    seconds.push_back(spent / repeats);
  }
  if (exchange_) {
    for (double& taken : seconds) {
      taken = typicalSeconds(taken);
    }
    seconds = exchange_->fromRankZero(seconds);
    if (exchange_->sharesMemory()) {
      // What everybody writes, everybody reads.
      const core::AlphaBeta sharing = core::fitAlphaBeta(exchange_->measureSharing());
      input_.costs.sharing = sharing;
      input_.costs.broadcast = sharing;
      input_.costs.all_reduce = {sharing.alpha, ranks_ * sharing.beta};
    } else {
      std::vector<core::CommSample> all_reduce;
      std::vector<core::CommSample> broadcast;
      const auto width = c10::elementSize(statistics_->type());
      exchange_->measure(device_, static_cast<std::size_t>(statistics_->elements()) * width, all_reduce, broadcast);
      input_.costs.all_reduce = core::fitAlphaBeta(all_reduce);
      input_.costs.broadcast = core::fitAlphaBeta(broadcast);
    }
  }
  for (std::size_t i = 0; i < samples.size(); ++i) {
    samples[i].seconds = std::max(seconds[i], 1e-9);
  }
  input_.costs.inversion = core::fitInversion(samples);

  // Each only where there is a layer for it: the script waits.
  double on_tiles = 0;
  double by_blas = 0;
  for (const KfacLayerSpec& spec : layers_) {
    const bool tiled = tiles_ && KfacDirections::usesTiles(spec, options_.form);
    double& product = tiled ? on_tiles : by_blas;
    product = product > 0 ? product : secondsOfProduct(tiled);
    const auto out = static_cast<double>(spec.outputs());
    const auto in = static_cast<double>(spec.inputDim());
    const double diagonal = spec.diagonalInput() ? out * in : out * in * in;
    const double form = options_.form == InverseForm::kEigen ? 2 : 1;
    input_.precondition.push_back(form * static_cast<double>(spec.groups) * (out * out * in + diagonal) * product);
  }
}

// Of a multiplication and an addition in a product of a common size. All ranks compute at once, as they will: so long
// that those which share a processor are in each other's way.
double KfacEngine::secondsOfProduct(bool tiles) {
  constexpr std::int64_t kSize = 192;
  constexpr double kWindow = 0.02;  // seconds
  const at::Tensor square = at::ones({kSize, kSize}, statistics_->options());
  at::Tensor result = at::empty_like(square);
  TiledDirection direction;
  TiledDirection::Work work;
  if (tiles) {
    direction.prepare(square.unsqueeze(0), square.unsqueeze(0), /*begin=*/0, kSize);
  }
  const auto multiply_once = [&] {
    if (tiles) {  // two products
      direction.compute({square.const_data_ptr<float>(), nullptr, kSize},
                        {result.mutable_data_ptr<float>(), nullptr, kSize}, work);
    } else if (queued_) {
      at::mm_out(result, square, square);
    } else if (statistics_->type() == at::kDouble) {
      multiplySquares<double>(square, result);
    } else {
      multiplySquares<float>(square, result);
    }
    waitForDevice(device_);
  };
  multiply_once();
  if (exchange_) {
    exchange_->mean(0);  // all begin together
  }
  const double start = monotonicSeconds();
  double seconds = 0;
  int products = 0;
  while (seconds < kWindow) {
    multiply_once();
    ++products;
    seconds = monotonicSeconds() - start;
  }
  seconds /= static_cast<double>(tiles ? 2 * products : products) * static_cast<double>(kSize * kSize * kSize);
  // The mean may differ in its last bit from rank to rank, and plans may not.
  return exchange_ ? exchange_->fromRankZero({typicalSeconds(seconds)}).front() : seconds;
}

// Of what all ranks have timed at once, by the mean of their speeds: where more ranks than processors share a host, one
// may have slept through all of its measurement, and its seconds would be most of a mean.
double KfacEngine::typicalSeconds(double seconds) { return 1 / exchange_->mean(1 / std::max(seconds, 1e-12)); }

void KfacEngine::makePlan() {
  const auto& slots = statistics_->slots();
  const auto width = c10::elementSize(statistics_->type());
  for (const FactorSlot& slot : slots) {
    input_.tasks.push_back({slot.layer, static_cast<std::size_t>(slot.dim), static_cast<std::size_t>(slot.count),
                            static_cast<std::size_t>(slot.size) * width,
                            static_cast<std::size_t>(inverseElements(slot, options_.form)) * width, slot.diagonal});
  }
  for (const KfacLayerSpec& spec : layers_) {
    input_.gradient_bytes.push_back(static_cast<std::size_t>(spec.groups * spec.outputs() * spec.inputDim()) * width);
  }
  for (int layer = 0; early_ && layer < static_cast<int>(layers_.size()); ++layer) {
    input_.early.push_back(isEarly(layer));
  }
  input_.ranks = ranks_;
  input_.steps_per_inverse = options_.inverse_update_steps;
  input_.worker_fraction = options_.worker_fraction;
  input_.max_run_bytes = static_cast<std::size_t>(options_.max_run_mb * (1 << 20));
  plan_ = core::makeKfacPlan(core::parseKfacStrategy(options_.strategy), input_);
  // Who asks for rows has no directions of shares.
  const bool split = options_.split_directions.value_or(plan_.split_directions && options_.gather_rows != true);
  plan_.split_directions = split && ranks_ > 1;

  // Directions that few ranks compute lie together by owner, and so do inverses that travel. Early ones come last.
  std::vector<int> order(layers_.size());
  std::iota(order.begin(), order.end(), 0);
  const auto key = [&](int layer) {
    const auto i = static_cast<std::size_t>(layer);
    return plan_.workers[i] < ranks_ ? plan_.layer_owner[i] : ranks_ + (isEarly(layer) ? 1 : 0);
  };
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return key(a) < key(b); });
  std::vector<int> parts(layers_.size(), 1);
  for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
    if (plan_.split_directions && plan_.workers[layer] == ranks_ &&
        KfacDirections::splits(layers_[layer], options_.form)) {
      parts[layer] = ranks_;
    }
  }
  KfacDirections::Layout layout{std::move(order), std::move(parts), tiles_};
  directions_ = queued_ ? makeQueuedDirections(layers_, statistics_->options(), std::move(layout))
                        : makeCpuDirections(layers_, statistics_->type(), std::move(layout));
  planInstalments();
  inverse_place_.assign(slots.size(), -1);
  std::int64_t elements = 0;
  for (int owner = 0; owner < ranks_; ++owner) {
    for (std::size_t i = 0; i < slots.size(); ++i) {
      const bool travels = !plan_.factors[i].everyone_inverts && plan_.workers[core::index(slots[i].layer)] > 1;
      if (travels && plan_.factors[i].owner == owner) {
        inverse_place_[i] = elements;
        elements += inverseElements(slots[i], options_.form);
      }
    }
  }
  if (elements > 0) {
    inverse_buffer_ = at::empty({elements}, statistics_->options());
  }
  if (exchange_) {
    payload_ = at::empty({statistics_->elements()}, statistics_->options());
  }
  inverter_ = {statistics_, exchange_ ? payload_ : statistics_->running(), {}, options_.form};
  for (const core::FactorPlan& factor : plan_.factors) {
    const bool summed = exchange_ && factor.exchange != core::FactorExchange::kOwnersOwn;
    inverter_.divisors.push_back(summed ? ranks_ : 1);
  }
  share_place_.assign(slots.size(), -1);
  const bool added_here = device_.is_cpu() && !throughMemory();
  std::int64_t owned = 0;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const core::FactorPlan& factor = plan_.factors[i];
    if (added_here && factor.exchange == core::FactorExchange::kReduceToOwner && factor.owner == rank_) {
      share_place_[i] = owned;
      owned += slots[i].size;
    }
  }
  if (owned > 0) {
    shares_ = at::empty({owned * (ranks_ - 1)}, statistics_->options());
  }
}

// After some profiled steps: runs by the ready times that rank 0 saw.
void KfacEngine::replanRuns() {
  if (!exchange_ || profiled_ != kProfiledSteps || !input_.ready.empty() ||
      plan_.strategy == core::KfacStrategy::kDkfac) {
    return;
  }
  input_.ready = exchange_->fromRankZero(ready_.seconds());
  plan_.fusion_ends = core::makeKfacPlan(plan_.strategy, input_).fusion_ends;
}

}  // namespace torchext
