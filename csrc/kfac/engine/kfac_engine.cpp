#include "kfac/engine/kfac_engine.h"

#include <utility>

#include "kfac/base/engine_guards.h"
#include "kfac/base/scoped_timer.h"

namespace torchext {
namespace {

void scale(const std::vector<at::Tensor>& gradients, double factor) {
  for (const at::Tensor& gradient : gradients) {
    if (factor != 1) {
      gradient.mul_(factor);
    }
  }
}

}  // namespace

KfacEngine::KfacEngine(std::vector<KfacLayerSpec> layers, KfacOptions options,
                       const c10::intrusive_ptr<c10d::ProcessGroup>& group, std::shared_ptr<GroupHealth> model)
    : context_(std::move(layers), std::move(options), group, std::move(model)),
      accumulator_(makeAccumulator(context_)),
      planner_(context_, *accumulator_),
      factors_(context_, *accumulator_, planner_.plan()),
      inverses_(context_, *accumulator_, factors_, planner_.plan()),
      gradients_(context_, planner_.plan(), planner_.input(), accumulator_->options(), planner_.usesTiles(),
                 inverses_.inverses()),
      hooks_(context_, factors_, gradients_) {}

bool KfacEngine::forward(int layer, const at::Tensor& input, const std::vector<at::Tensor>& outputs) {
  return hooks_.forward(layer, input, outputs, std::shared_ptr<FactorHooks>(shared_from_this(), &hooks_));
}

bool KfacEngine::step(const std::vector<double>& rates, const std::vector<at::Tensor>& others, double loss_scale,
                      double gradient_scale, bool found_inf) {
  const EngineGuards guards;
  const ReentrancyGuard guard(context_.turn, "step");
  TORCH_CHECK_VALUE(rates.size() == context_.layers.size(), "rates: ", rates.size(), " for ", context_.layers.size(),
                    " layers");
  factors_.noteLossScale(loss_scale);
  if (!gradients_.load(gradient_scale, others) || found_inf) {
    return skipStep();
  }
  mergeFactors(loss_scale);
  updateInverses();
  gradients_.makeRest();
  gradients_.exchange();
  planRows();
  scale(others, gradient_scale);
  gradients_.write(rates);  // nothing waits for a peer from here on
  hooks_.endStep();
  ++context_.counters.steps;
  return true;
}

// On all ranks, for they share the gradients.
bool KfacEngine::skipStep() {
  gradients_.skip();
  drop(/*sent=*/true);
  ++context_.counters.skipped;
  return false;
}

void KfacEngine::mergeFactors(double loss_scale) {
  hooks_.takeStep();
  if (!context_.updatesFactors()) {
    return;
  }
  hooks_.addDeferred();  // of a backward pass that ended with an error
  if (context_.sendsFactors()) {
    sendFactors(loss_scale);
  }
  factors_.merge(loss_scale);
}

// Sends a step's factors and returns once all ranks take the step, or throws on all. Nothing is changed before that,
// and nothing leaves that a rank without this step would not receive.
void KfacEngine::sendFactors(double loss_scale) {
  factors_.startRest(loss_scale);
  bool again = false;
  {
    const ScopedTimer timer(context_.counters.exchange_wait_seconds);
    FactorExchange::Votes votes = agreeOnStep(/*takes_step=*/true);
    row_counts_ = std::move(votes.beside);
    again = votes.again;
    if (again) {
      factors_.endBuckets();
    }
  }
  if (again) {
    factors_.startRest(loss_scale);
  }
  factors_.sumAtOnce();
}

// All ranks take a step, or none does. If they differ, what has been sent comes to its end on all of them, the step is
// forgotten, and all throw. Each rank says besides how many rows its layers have had.
FactorExchange::Votes KfacEngine::agreeOnStep(bool takes_step) {
  FactorExchange::Votes votes = factors_.vote(takes_step, gradients_.ownRowCounts());
  if (votes.differing < 0) {
    return votes;
  }
  factors_.endBuckets();
  forgetStep();
  const int leaves = takes_step ? votes.differing : context_.rank;
  const int takes = takes_step ? context_.rank : votes.differing;
  C10_THROW_ERROR(DistBackendError,
                  c10::str("torchext.optim: rank ", leaves, " left out step ", context_.counters.steps,
                           " (cleared its gradients without step()), rank ", takes,
                           " did not; step() is collective: take or leave it on all ranks alike, for example by an "
                           "all-reduce of the condition"));
}

// A layer's direction is made as soon as its inverses are there, while later ones travel.
void KfacEngine::updateInverses() {
  if (context_.updatesInverses()) {
    inverses_.run([this](int layer) { gradients_.make(layer); });
  }
}

// Every rank has said how many rows its layers have had, and all choose alike for the steps to come.
void KfacEngine::planRows() {
  if (context_.updatesInverses()) {
    gradients_.planRows(context_.comm ? row_counts_ : gradients_.ownRowCounts().unsqueeze(0));
  }
}

void KfacEngine::forgetStep() {
  accumulator_->discard();
  hooks_.forgetDeferred();
  gradients_.forget();
  hooks_.endStep();
}

// Ends a step without its sums. `sent`: a backward pass may have sent some of them. Every rank then sends all, for
// nothing: a collective that one rank leaves out would be met by its next one.
void KfacEngine::drop(bool sent) {
  forgetStep();
  if (!context_.sendsFactors() || !sent) {
    return;
  }
  factors_.startRest(/*loss_scale=*/1);
  agreeOnStep(/*takes_step=*/false);
  factors_.endBuckets();
}

void KfacEngine::discard() {
  const EngineGuards guards;
  const ReentrancyGuard guard(context_.turn, "discard");
  drop(hooks_.seenBackward());
}

void KfacEngine::setDamping(double damping) {
  KfacOptions changed = context_.options;
  changed.damping = damping;
  changeOptions(changed);
}

void KfacEngine::setKlClip(std::optional<double> kl_clip) {
  KfacOptions changed = context_.options;
  changed.kl_clip = kl_clip;
  changeOptions(changed);
}

void KfacEngine::changeOptions(const KfacOptions& changed) {
  changed.validate();
  const EngineLock lock(context_.turn);
  context_.options = changed;
}

std::size_t KfacEngine::rowLayers() const {
  const EngineLock lock(context_.turn);
  return gradients_.rowLayers();
}

KfacStats KfacEngine::stats() const {
  const EngineLock lock(context_.turn);
  KfacStats stats{context_.counters};
  stats.clip = gradients_.clip();
  stats.factors_left_out = accumulator_->leftOut();
  if (context_.comm) {
    stats.bytes = context_.comm->bytes();
  }
  stats.memory_bytes =
      static_cast<std::int64_t>(accumulator_->bytes() + factors_.bytes() + inverses_.bytes() + gradients_.bytes());
  return stats;
}

std::vector<FactorState> KfacEngine::state() {
  const EngineGuards guards;
  const ReentrancyGuard guard(context_.turn, "state_dict");
  const auto copy = [](const at::Tensor& from) { return from.defined() ? from.clone() : at::Tensor(); };
  const auto& layouts = accumulator_->layouts();
  const at::Tensor mean = factors_.mean();
  std::vector<FactorState> result;
  for (std::size_t i = 0; i < layouts.size(); ++i) {
    const FactorInverse inverse = inverses_.ofOwner(i);
    result.push_back({accumulator_->slice(mean, layouts[i]).clone(), copy(inverse.matrix), copy(inverse.values)});
  }
  return result;
}

void KfacEngine::load(const std::vector<FactorState>& state, std::int64_t steps, std::int64_t factor_updates) {
  const EngineGuards guards;
  const ReentrancyGuard guard(context_.turn, "load_state_dict");
  drop(hooks_.seenBackward());
  const auto& layouts = accumulator_->layouts();
  TORCH_CHECK_VALUE(state.size() == layouts.size(), "the state has ", state.size(), " factors, the model ",
                    layouts.size());
  for (std::size_t i = 0; i < layouts.size(); ++i) {
    accumulator_->slice(accumulator_->running(), layouts[i]).copy_(state[i].factor);
    inverses_.load(i, {state[i].matrix, state[i].values});
  }
  gradients_.inversesChanged();
  context_.counters.steps = steps;
  context_.counters.factor_updates = factor_updates;
}

}  // namespace torchext
