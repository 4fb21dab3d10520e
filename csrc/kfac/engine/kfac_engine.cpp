// The life of a step: hooks, sums, skipping, clipping. The other kfac_engine_*.cpp have what their names say.
#include "kfac/engine/kfac_engine.h"

#include <algorithm>

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include "kfac/base/engine_guards.h"
#include "kfac/base/scoped_timer.h"
#include "kfac/factors/weight_use.h"

namespace torchext {
namespace {

// Of tensors that would be freed earlier without K-FAC.
constexpr std::size_t kLargestDeferred = std::size_t{16} << 20;

// Whether the backward pass that runs here has a gradient of `weight` for its caller. torch.autograd.grad() of
// something else does not: it only comes past.
bool reaches(const at::Tensor& weight) {
  const auto* only = torch::autograd::get_current_graph_task_exec_info();
  if (only == nullptr || only->empty()) {
    return true;  // backward(), to all leaves
  }
  const auto leaf = torch::autograd::impl::grad_accumulator(weight);
  const auto found = only->find(leaf.get());
  return found != only->end() && found->second.should_execute();
}

// Under autocast a layer reads a copy of its input in the type of its output, and the input may change afterwards.
at::Tensor asRead(const KfacLayerSpec& spec, const at::Tensor& input, at::ScalarType type_of_output) {
  const EngineGuards guards;
  const at::Tensor read = denseSamples(spec, input.detach(), /*is_input=*/true);
  return read.is_floating_point() && read.scalar_type() != type_of_output ? read.to(type_of_output) : read;
}

// Nothing of a tensor whose elements are not laid out by sizes.
std::optional<std::vector<std::int64_t>> sizesOf(const torch::autograd::InputMetadata& output) {
  if (output.is_nested_tensor() || output.is_cpp_nested_tensor()) {
    return std::nullopt;
  }
  std::vector<std::int64_t> sizes;
  for (const c10::SymInt& size : output.shape_as_dim_vector()) {
    sizes.push_back(size.guard_int(__FILE__, __LINE__));
  }
  return sizes;
}

}  // namespace

KfacEngine::ReentrancyGuard::ReentrancyGuard(KfacEngine& engine, const char* call)
    : engine_(engine), lock_(engine.mutex_) {
  TORCH_CHECK(engine_.inside_ == nullptr, "torchext.optim: ", call, "() was called by a signal's handler while ",
              engine_.inside_, "() waits for another rank; set a flag in the handler, and do it after the step");
  engine_.inside_ = call;
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

bool KfacEngine::forward(int layer, const at::Tensor& input, const std::vector<at::Tensor>& outputs) {
  const bool seen = stats_.steps % options_.factor_update_steps == 0 || takesRows(layer);
  if (!seen || !at::GradMode::is_enabled()) {
    return true;
  }
  const KfacLayerSpec& spec = layers_[static_cast<std::size_t>(layer)];
  const auto use = WeightUse::find(spec.weight, outputs);
  if (!use) {
    return false;
  }
  const auto& output = use->output();
  TORCH_CHECK_VALUE(output.device() == device_ && input.device() == device_, "torchext.optim: ", spec.name, " was on ",
                    device_, " when the optimizer was made, and computes on ", output.device(),
                    " now; move the model first");
  // The hook lives in the graph, and dies with it or with the engine. Autograd keeps for the weight's gradient what the
  // layer has read: the input, or its copy in the type of autocast. A forward pass inside of a backward one is that of
  // a reentrant checkpoint: what comes of it, in a pass of its own, belongs to the outer one.
  const int outer = torch::autograd::get_current_graph_task_id();
  const at::Tensor kept = asRead(spec, input, c10::typeMetaToScalarType(output.dtype()));
  const auto sizes = outputSizes(spec, kept, sizesOf(output));
  const auto version = kept.is_inference() ? 0 : kept._version();
  use->watch(this, [weak = weak_from_this(), layer, outer, kept, version, sizes](const at::Tensor& gradient) {
    const auto engine = weak.lock();
    if (!engine) {
      return;
    }
    const KfacLayerSpec& spec = engine->layers_[static_cast<std::size_t>(layer)];
    // Autograd sees that, too, but not where it has kept a copy of its own: of an input that the layer has padded.
    TORCH_CHECK_VALUE(kept.is_inference() || kept._version() == version, "torchext.optim: the input of ", spec.name,
                      " was changed in place between the forward and the backward pass; change a copy of it, or "
                      "leave the layer to the plain gradient, by its name in skip_layers");
    const int pass = outer >= 0 ? outer : torch::autograd::get_current_graph_task_id();
    at::Tensor samples;
    {
      const EngineGuards guards;
      samples = denseSamples(spec, gradient.detach(), /*is_input=*/false).reshape(sizes);
    }
    engine->backward(layer, kept, samples, pass);
  });
  return true;
}

void KfacEngine::backward(int layer, const at::Tensor& input, const at::Tensor& gradient, int pass) {
  const auto number = static_cast<std::size_t>(layer);
  if (!reaches(layers_[number].weight)) {
    return;
  }
  const EngineGuards guards;
  const ReentrancyGuard guard(*this, "backward");
  const ScopedTimer timer(stats_.factor_seconds);
  keepRows(layer, input, gradient);
  if (stats_.steps % options_.factor_update_steps != 0) {
    return;
  }
  seen_backward_ = true;
  if (defer(layer, input, gradient, pass)) {
    return;
  }
  const bool together = onFirstStream();
  const bool profiled = exchanging() && input_.ready.empty();
  if (profiled) {
    ready_.start();
  }
  accumulator_->add(layer, input, gradient, pass, !putsProductsOff());
  Calls& calls = calls_[number];
  const auto first = 2 * (layers_.size() - 1 - number);
  for (const std::size_t factor_index : {first, first + 1}) {
    if (profiled) {
      ready_.mark(factor_index);
    }
    stale_ = stale_ || prepared_[factor_index];
    if (exchanging() && !throughMemory() && calls.stable && !scaled_loss_ &&
        accumulator_->calls(layer) == calls.expected) {
      prepare(factor_index, /*loss_scale=*/1);
    }
  }
  if (exchanging() && together) {
    startBuckets(/*overlapped=*/true);
  }
}

// Whether this hook runs on the stream of the step's first one. A bucket leaves from the stream of its last factor;
// factors of other streams are there for certain only when the backward pass has ended.
bool KfacEngine::onFirstStream() {
  if (device_.is_cpu()) {
    return true;
  }
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  if (!stream_) {
    stream_ = stream;
  }
  several_streams_ = several_streams_ || *stream_ != stream;
  return !several_streams_;
}

bool KfacEngine::defer(int layer, const at::Tensor& input, const at::Tensor& gradient, int backward_pass) {
  const std::size_t bytes = input.nbytes() + gradient.nbytes();
  if (!exchange_ || device_path_ || exchanging() || deferred_bytes_ + bytes > kLargestDeferred) {
    return false;
  }
  deferred_.push_back({layer, input, gradient, backward_pass});
  deferred_bytes_ += bytes;
  callAtEndOfPass();
  return true;
}

// What can be made while the backward pass waits for DDP's all-reduces, once it has nothing else to compute.
void KfacEngine::callAtEndOfPass() {
  const int here = torch::autograd::get_current_graph_task_id();
  if (calling_pass_ == here) {
    return;
  }
  calling_pass_ = here;
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this()] {
    if (const auto engine = weak.lock()) {
      const EngineGuards guards;
      const ReentrancyGuard guard(*engine, "backward");
      engine->addDeferred();
      if (engine->rows_) {
        engine->rows_->begin();
      }
    }
  });
}

void KfacEngine::addDeferred() {
  const ScopedTimer timer(stats_.factor_seconds);
  for (const Deferred& call : deferred_) {
    accumulator_->add(call.layer, call.input, call.gradient, call.backward_pass, !putsProductsOff());
  }
  forgetDeferred();
}

void KfacEngine::forgetDeferred() {
  deferred_.clear();
  deferred_bytes_ = 0;
}

// Whether this step's products are made together with those of later ones (deferred_gram.h). Not in one process, which
// resumes from a checkpoint to the last bit: there averages do not depend on when they are looked at.
bool KfacEngine::putsProductsOff() const { return exchange_ && !exchanging(); }

double KfacEngine::currentDecay() const {
  if (!options_.martens_decay) {
    return options_.decay;
  }
  return std::min(1.0 - 1.0 / static_cast<double>(stats_.factor_updates + 1), options_.decay);
}

bool KfacEngine::step(const std::vector<double>& rates, const std::vector<at::Tensor>& others, double loss_scale,
                      double gradient_scale, bool found_inf) {
  const EngineGuards guards;
  const ReentrancyGuard guard(*this, "step");
  TORCH_CHECK_VALUE(rates.size() == layers_.size(), "rates: ", rates.size(), " for ", layers_.size(), " layers");
  if (loss_scale != 1) {  // what has left already was taken for that of a plain loss
    stale_ = stale_ || std::any_of(prepared_.begin(), prepared_.end(), [](bool done) { return done; });
    scaled_loss_ = true;
  }
  const bool of_rows = rows_ && !updatesInverses();
  if (of_rows) {
    const ScopedTimer timer(stats_.exchange_wait_seconds);
    rows_->leave();
  }
  const bool finite = preconditioner_->collect(gradient_scale, others, ofRows()) && !found_inf;
  if (!finite) {
    if (of_rows) {
      endRows();
    }
    drop(/*sent=*/true);
    ++stats_.skipped;
    return false;
  }
  seen_backward_ = false;  // whatever this step comes to, discard() has nothing to end
  if (stats_.steps % options_.factor_update_steps == 0) {
    addDeferred();  // of a backward pass that ended with an error
    if (exchanging()) {
      sendFactors(loss_scale);
    }
    mergeStep(loss_scale);
  }
  startDirections();
  if (updatesInverses()) {
    updateInverses();
  }
  if (gradient_scale != 1) {
    for (const at::Tensor& other : others) {
      other.mul_(gradient_scale);
    }
  }
  finishDirections();
  if (of_rows) {
    takeWritten();
    const ScopedTimer timer(stats_.exchange_wait_seconds);
    endRows();
  }
  if (updatesInverses()) {
    planRows(exchange_ ? all_row_counts_ : ownRowCounts().unsqueeze(0));
  }
  {  // nothing waits for a peer after it
    const ScopedTimer timer(stats_.precondition_seconds);
    stats_.row_directions_ahead += preconditioner_->write(rates, options_.kl_clip);
  }
  if (of_rows) {
    foreseeRows(rates);
  }
  endPass();
  ++stats_.steps;
  replanBuckets();
  return true;
}

// Takes a step's sums into the running averages, once all ranks are known to do so.
void KfacEngine::mergeStep(double loss_scale) {
  const ScopedTimer timer(stats_.factor_seconds);
  for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
    const int calls = accumulator_->calls(static_cast<int>(layer));
    calls_[layer].stable = calls > 0 && calls == calls_[layer].expected;
    calls_[layer].expected = calls;
  }
  accumulator_->merge(currentDecay(), loss_scale);
  ++stats_.factor_updates;
  profiled_ += exchanging() ? 1 : 0;
}

// What each rank has, for all: [ranks, elements]. Blocks.
at::Tensor KfacEngine::ofAllRanks(const at::Tensor& own, int tag) {
  if (!exchange_) {
    return own.unsqueeze(0);
  }
  at::Tensor all = at::empty({ranks_, own.numel()}, own.options());
  all.select(0, rank_).copy_(own);
  if (throughMemory()) {
    exchange_->gatherParts(all.unbind());
  } else {
    auto works = exchange_->gather(all, tag);
    KfacExchange::wait(works);
  }
  return all;
}

void KfacEngine::endPass() {
  ready_.restart();
  stream_.reset();
  several_streams_ = false;
  seen_backward_ = false;
  stale_ = false;
}

KfacStats KfacEngine::stats() const {
  const Lock lock(mutex_);
  KfacStats stats = stats_;
  stats.clip = preconditioner_->clip();
  stats.factors_left_out = accumulator_->leftOut();
  if (exchange_) {
    stats.bytes = exchange_->bytes();
  }
  std::size_t bytes = accumulator_->bytes() + preconditioner_->bytes();
  bytes += rows_ ? rows_->bytes() : 0;
  bytes += inverse_exchange_->bytes();
  for (const at::Tensor* buffer : {&payload_, &shares_}) {
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
