// The life of a step: hooks, sums, sending, skipping, clipping. Inverses are in kfac_engine_inverses.cpp.
#include "optim/kfac_engine.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <limits>

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>

#include "core/check.h"

namespace torchext {
namespace {

using Clock = std::chrono::steady_clock;

double now() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

// Adds the seconds of a block to a sum.
class Timed {
 public:
  explicit Timed(double& sum) : sum_(sum), start_(now()) {}
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;
  ~Timed() { sum_ += now() - start_; }

 private:
  double& sum_;
  double start_;
};

// Ready times are taken from the steps before this one, then runs are planned for good.
constexpr std::int64_t kProfiledUpdates = 5;

std::int64_t hashOf(const std::string& text) {
  std::uint64_t hash = 1469598103934665603ULL;
  for (const char c : text) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ULL;
  }
  return static_cast<std::int64_t>(hash);
}

std::string describeLayers(const std::vector<KfacLayerSpec>& layers) {
  std::string text;
  for (const auto& layer : layers) {
    text += c10::str(layer.name, layer.weight.sizes(), layer.bias ? "+" : "", layer.groups, ";");
  }
  return text;
}

at::ScalarType typeOf(const std::vector<KfacLayerSpec>& layers) {
  const bool doubles = std::any_of(layers.begin(), layers.end(),
                                   [](const auto& layer) { return layer.weight.scalar_type() == at::kDouble; });
  return doubles ? at::kDouble : at::kFloat;
}

}  // namespace

void KfacOptions::validate() const {
  using core::throwInvalid;
  if (!(damping > 0) || !std::isfinite(damping)) {
    throwInvalid("damping", damping, "above 0, finite");
  }
  if (!(decay >= 0 && decay < 1)) {
    throwInvalid("factor_decay", decay, "[0, 1)");
  }
  if (kl_clip && (!(*kl_clip > 0) || !std::isfinite(*kl_clip))) {
    throwInvalid("kl_clip", *kl_clip, "above 0, finite; None for no clip");
  }
  if (factor_update_steps < 1) {
    throwInvalid("factor_update_steps", factor_update_steps, "1 or more");
  }
  if (inverse_update_steps < 1 || inverse_update_steps % factor_update_steps != 0) {
    throwInvalid("inverse_update_steps", inverse_update_steps,
                 core::concat("a multiple of factor_update_steps = ", factor_update_steps));
  }
  if (!(worker_fraction > 0 && worker_fraction <= 1)) {
    throwInvalid("worker_fraction", worker_fraction, "above 0, up to 1");
  }
  if (!(max_run_mb > 0) || !std::isfinite(max_run_mb)) {
    throwInvalid("max_run_mb", max_run_mb, "above 0, finite");
  }
  core::parseKfacStrategy(strategy);
}

KfacEngine::KfacEngine(std::vector<KfacLayerSpec> layers, KfacOptions options,
                       const c10::intrusive_ptr<c10d::ProcessGroup>& group)
    : layers_(std::move(layers)),
      options_((options.validate(), std::move(options))),
      exchange_(group && group->getSize() > 1 ? std::make_unique<KfacExchange>(group) : nullptr),
      rank_(exchange_ ? exchange_->rank() : 0),
      ranks_(exchange_ ? exchange_->size() : 1),
      statistics_(layers_, typeOf(layers_), options_.scaling),
      inverses_(statistics_.slots().size()),
      prepared_(statistics_.slots().size(), false),
      calls_(layers_.size()),
      ready_(statistics_.slots().size(), 0.0) {
  if (exchange_) {
    const auto bits = [](double value) { return std::bit_cast<std::int64_t>(value); };
    exchange_->agree(
        {"the number of layers", "names and shapes of the layers (hash)", "factor_update_steps", "inverse_update_steps",
         "strategy (hash)", "method and scaling", "factor_decay (bits)", "damping (bits)", "worker_fraction (bits)",
         "max_run_mb (bits)", "exchange_always and martens_decay", "split_directions"},
        {static_cast<std::int64_t>(layers_.size()), hashOf(describeLayers(layers_)), options_.factor_update_steps,
         options_.inverse_update_steps, hashOf(options_.strategy),
         2 * static_cast<std::int64_t>(options_.form) + static_cast<std::int64_t>(options_.scaling),
         bits(options_.decay), bits(options_.damping), bits(options_.worker_fraction), bits(options_.max_run_mb),
         2 * static_cast<std::int64_t>(options_.exchange_always) + static_cast<std::int64_t>(options_.martens_decay),
         options_.split_directions ? static_cast<std::int64_t>(*options_.split_directions) : -1});
  }
  measureCosts();
  makePlan();
}

void KfacEngine::setDamping(double damping) {
  KfacOptions changed = options_;
  changed.damping = damping;
  changed.validate();
  const Lock lock(mutex_);
  options_ = changed;
}

void KfacEngine::setKlClip(std::optional<double> kl_clip) {
  KfacOptions changed = options_;
  changed.kl_clip = kl_clip;
  changed.validate();
  const Lock lock(mutex_);
  options_ = changed;
}

void KfacEngine::forward(int layer, const at::Tensor& input, const at::Tensor& output) {
  if (!at::GradMode::is_enabled() || !output.requires_grad() || stats_.steps % options_.factor_update_steps != 0) {
    return;
  }
  // The hook lives in the graph, and dies with it or with the engine. Autograd keeps the input for the weight's
  // gradient anyway, and refuses to go on if it was changed in between.
  output.register_hook([weak = weak_from_this(), layer, kept = input.detach()](const at::TensorBase& gradient) {
    if (const auto engine = weak.lock(); engine && gradient.defined()) {
      engine->backward(layer, kept, at::Tensor(gradient));
    }
  });
}

void KfacEngine::backward(int layer, const at::Tensor& input, const at::Tensor& gradient) {
  const at::NoGradGuard no_grad;
  const Lock lock(mutex_);
  const Timed timed(stats_.factor_seconds);
  const auto number = static_cast<std::size_t>(layer);
  if (!pass_start_) {
    pass_start_ = now();
  }
  statistics_.add(layer, input.detach(), gradient.detach(), torch::autograd::get_current_graph_task_id());
  Calls& calls = calls_[number];
  const auto first = 2 * (layers_.size() - 1 - number);
  for (const std::size_t slot : {first, first + 1}) {
    ready_[slot] = now() - *pass_start_;
    if (exchanging() && calls.stable && !scaled_loss_ && statistics_.calls(layer) == calls.expected) {
      prepare(slot, /*merged=*/false);
    }
  }
  if (exchanging()) {
    startRuns(/*overlapped=*/true);
  }
}

double KfacEngine::currentDecay() const {
  if (!options_.martens_decay) {
    return options_.decay;
  }
  return std::min(1.0 - 1.0 / static_cast<double>(stats_.factor_updates + 1), options_.decay);
}

bool KfacEngine::exchanging() const {
  return exchange_ && (options_.exchange_always || stats_.steps % options_.inverse_update_steps == 0);
}

void KfacEngine::prepare(std::size_t slot, bool merged) {
  if (prepared_[slot]) {
    return;
  }
  prepared_[slot] = true;
  const FactorSlot& place = statistics_.slots()[slot];
  if (merged) {
    statistics_.slice(payload_, place).copy_(statistics_.slice(statistics_.running(), place));
  } else {
    statistics_.preview(place, currentDecay(), 1.0, payload_);
  }
}

void KfacEngine::startRuns(bool overlapped) {
  const auto& ends = plan_.fusion_ends;
  while (started_ < ends.size()) {
    const std::size_t begin = started_ == 0 ? 0 : core::index(ends[started_ - 1]);
    const std::size_t end = core::index(ends[started_]);
    const auto from = prepared_.begin() + static_cast<std::ptrdiff_t>(begin);
    if (!std::all_of(from, prepared_.begin() + static_cast<std::ptrdiff_t>(end), [](bool done) { return done; })) {
      return;
    }
    const FactorSlot& first = statistics_.slots()[begin];
    const FactorSlot& last = statistics_.slots()[end - 1];
    const at::Tensor run = payload_.narrow(0, first.offset, last.offset + last.size - first.offset);
    switch (plan_.factors[begin].exchange) {
      case core::FactorExchange::kAllReduce:
        works_.push_back(exchange_->allReduce(run));
        break;
      case core::FactorExchange::kReduceToOwner:
        works_.push_back(exchange_->reduce(run, plan_.factors[begin].owner));
        break;
      case core::FactorExchange::kOwnersOwn:
        works_.emplace_back();
        break;
    }
    ++started_;
    ++stats_.runs;
    stats_.runs_overlapped += overlapped ? 1 : 0;
  }
}

// Ends a step without its sums. If runs have left on some rank, every rank sends all of them, for nothing: a collective
// that one rank leaves out would be met by its next one.
void KfacEngine::drop(bool runs_left) {
  if (runs_left) {
    for (std::size_t slot = 0; slot < prepared_.size(); ++slot) {
      prepare(slot, /*merged=*/true);
    }
    startRuns(/*overlapped=*/false);
  }
  for (const auto& work : works_) {
    if (work) {
      work->wait();
    }
  }
  works_.clear();
  started_ = 0;
  std::fill(prepared_.begin(), prepared_.end(), false);
  statistics_.discard();
  pass_start_.reset();
}

void KfacEngine::discard() {
  const at::NoGradGuard no_grad;
  const Lock lock(mutex_);
  drop(started_ > 0);
}

bool KfacEngine::step(const std::vector<double>& rates, const std::vector<at::Tensor>& others, double loss_scale,
                      double gradient_scale, bool found_inf) {
  const at::NoGradGuard no_grad;
  const Lock lock(mutex_);
  TORCH_CHECK_VALUE(rates.size() == layers_.size(), "rates: ", rates.size(), " for ", layers_.size(), " layers");
  scaled_loss_ = scaled_loss_ || loss_scale != 1;
  bool finite = directions_->collect(gradient_scale) && !found_inf;
  for (const at::Tensor& other : others) {
    finite = finite && isFinite(other);
  }
  if (!finite) {
    drop(exchanging());
    ++stats_.skipped;
    return false;
  }
  if (gradient_scale != 1) {
    for (const at::Tensor& other : others) {
      other.mul_(gradient_scale);
    }
  }
  if (stats_.steps % options_.factor_update_steps == 0) {
    const Timed timed(stats_.factor_seconds);
    for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
      const int calls = statistics_.calls(static_cast<int>(layer));
      calls_[layer].stable = calls > 0 && calls == calls_[layer].expected;
      calls_[layer].expected = calls;
    }
    stats_.factors_left_out += statistics_.merge(currentDecay(), loss_scale);
    ++stats_.factor_updates;
  }
  if (exchanging() || stats_.steps % options_.inverse_update_steps == 0) {
    updateInverses();
  }
  {
    const Timed timed(stats_.precondition_seconds);
    for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
      if (worksOn(static_cast<int>(layer))) {
        const auto first = 2 * (layers_.size() - 1 - layer);
        const int part = directions_->parts(static_cast<int>(layer)) > 1 ? rank_ : 0;
        directions_->precondition(static_cast<int>(layer), part, inverses_[first + 1], inverses_[first], options_.form,
                                  options_.damping);
      }
    }
  }
  distributeDirections();
  const Timed timed(stats_.precondition_seconds);
  stats_.clip = 1;
  if (options_.kl_clip) {
    const double product = std::abs(directions_->product(rates));
    stats_.clip = product > 0 ? std::min(1.0, std::sqrt(*options_.kl_clip / product)) : 1.0;
  }
  directions_->write(stats_.clip);
  pass_start_.reset();
  ++stats_.steps;
  replanRuns();
  return true;
}

// After some profiled updates: runs by the ready times that rank 0 saw.
void KfacEngine::replanRuns() {
  if (!exchange_ || stats_.factor_updates != kProfiledUpdates || !input_.ready.empty() ||
      plan_.strategy == core::KfacStrategy::kDkfac) {
    return;
  }
  input_.ready = exchange_->fromRankZero(ready_);
  plan_.fusion_ends = core::makeKfacPlan(plan_.strategy, input_).fusion_ends;
}

KfacStats KfacEngine::stats() const {
  const Lock lock(mutex_);
  KfacStats stats = stats_;
  if (exchange_) {
    stats.bytes = exchange_->bytes();
  }
  std::size_t bytes = statistics_.bytes() + directions_->bytes();
  for (const at::Tensor* buffer : {&payload_, &inverse_buffer_}) {
    bytes += buffer->defined() ? buffer->nbytes() : 0;
  }
  for (const FactorInverse& inverse : inverses_) {
    bytes += inverse.matrix.defined() ? inverse.matrix.nbytes() : 0;
    bytes += inverse.values.defined() ? inverse.values.nbytes() : 0;
  }
  stats.memory_bytes = static_cast<std::int64_t>(bytes);
  return stats;
}

}  // namespace torchext
