#include "kfac/inverses/inverse_update.h"

#include <utility>

#include "core/base/check.h"
#include "kfac/base/scoped_timer.h"

namespace torchext {
namespace {

// Inverses of the last so many factors are left the time to come while this rank makes its own of later ones, for which
// others wait. Eight layers 1024 wide over four hosts (kfac_network.py), milliseconds a step: 1223 with 2,
// 1233 with 4, 1209 with 8, 1228 with 12, all within what runs vary by; making none before the last bucket, 1349.
constexpr std::size_t kOnTheirWay = 8;

}  // namespace

InverseUpdate::InverseUpdate(KfacContext& context, std::shared_ptr<FactorAccumulator> accumulator,
                             FactorExchange& factors, const core::KfacPlan& plan)
    : context_(context),
      accumulator_(std::move(accumulator)),
      factors_(factors),
      plan_(plan),
      inverter_{accumulator_, factors.summed(), factors.divisors(), context.options.form},
      inverse_exchange_(plan, *accumulator_, context.options.form, context.comm.get()),
      inverses_(accumulator_->layouts().size()),
      in_batches_(context.on_device),
      overlaps_(plan.strategy != core::KfacStrategy::kDkfac && context.overlaps() && !in_batches_) {
  if (context_.comm && overlaps_) {
    factors_.handOverTo(this);
  }
}

// Whether a rank that owns one factor of a layer may not have the other, of which it needs the trace.
bool InverseUpdate::tracesTravel() const {
  for (std::size_t i = 0; i + 1 < plan_.factors.size(); i += 2) {
    if (plan_.factors[i].exchange == core::FactorExchange::kReduceToOwner &&
        plan_.factors[i].owner != plan_.factors[i + 1].owner) {
      return context_.options.form == InverseForm::kInverse;
    }
  }
  return false;
}

// What the arrival of a bucket makes possible is inverted, as far as that needs no more than factors.
void InverseUpdate::follow(Communicator::Sum sum, std::size_t end) {
  if (!background_) {
    background_ = std::make_unique<BackgroundInverses>(context_.comm->watch());
  }
  if (background_->runs() == 0) {
    followed_damping_ = context_.options.damping;
  }
  std::vector<std::size_t> factor_indices;
  for (; followed_ + 1 < end; followed_ += 2) {
    for (const std::size_t factor_index : {followed_, followed_ + 1}) {
      if (!tracesTravel() && invertsHere(factor_index)) {
        factor_indices.push_back(factor_index);
      }
    }
  }
  background_->follow(std::move(sum), std::move(factor_indices), inverter_, followed_damping_);
}

void InverseUpdate::waitFor(std::size_t buckets) {
  if (background_) {
    background_->waitForRuns(buckets);
  }
}

void InverseUpdate::end() {
  if (background_) {
    background_->end();
  }
  followed_ = 0;
}

// Whether the thread was asked for inverses, and with the damping that is in force now.
bool InverseUpdate::madeInBackground() const {
  return background_ && !tracesTravel() && followed_damping_ == context_.options.damping;
}

void InverseUpdate::run(const Ready& ready) {
  if (context_.comm && tracesTravel()) {
    sendTraces();
  }
  taken_ = 0;
  collected_.clear();  // of an update that was interrupted
  collected_from_.clear();
  inverse_exchange_.expect();
  invertBuckets(ready);
  invertCollected();
  factors_.endBuckets();
  finishInverses(ready);
  traces_sum_.wait();  // where this rank inverts nothing
  traces_ = at::Tensor();
  ++context_.counters.inverse_updates;
}

void InverseUpdate::sendTraces() {
  std::vector<at::Tensor> own;
  for (const FactorLayout& layout : accumulator_->layouts()) {
    own.push_back(accumulator_->traces(accumulator_->slice(accumulator_->running(), layout), layout));
  }
  traces_ = at::cat(own);
  traces_sum_ = context_.comm->addUp(traces_);
}

// Of the mean of a factor whose bucket has come.
at::Tensor InverseUpdate::tracesOf(std::size_t factor_index) const {
  if (!traces_.defined()) {
    return inverter_.traces(factor_index);
  }
  const auto& layouts = accumulator_->layouts();
  std::int64_t offset = 0;
  for (std::size_t i = 0; i < factor_index; ++i) {
    offset += layouts[i].count;
  }
  return traces_.narrow(0, offset, layouts[factor_index].count) / context_.ranks;
}

// Of the two factors of a layer, each [count]; undefined where it belongs to the product (kEigen).
std::array<at::Tensor, 2> InverseUpdate::dampingOfLayer(std::size_t first_factor) {
  if (context_.options.form == InverseForm::kEigen) {
    return {};
  }
  traces_sum_.wait();
  return inverter_.dampings(first_factor, {tracesOf(first_factor), tracesOf(first_factor + 1)},
                            context_.options.damping);
}

void InverseUpdate::invert(std::size_t factor_index, const at::Tensor& damping) {
  InverseFailures& failures = context_.counters.failures;
  FactorInverse inverse = madeInBackground() ? background_->collect(factor_index, failures)
                                             : inverter_.invert(factor_index, damping, failures);
  if (inverse.defined()) {
    inverses_[factor_index] = std::move(inverse);
  }
}

// The two factors of a layer, as far as this rank inverts them.
void InverseUpdate::invertLayer(std::size_t first_factor, const Ready& ready) {
  if (!invertsHere(first_factor) && !invertsHere(first_factor + 1)) {
    return;
  }
  const auto damping = madeInBackground() ? std::array<at::Tensor, 2>() : dampingOfLayer(first_factor);
  for (const std::size_t side : {0, 1}) {
    const std::size_t factor_index = first_factor + side;
    if (!invertsHere(factor_index)) {
      continue;
    }
    {
      const ScopedTimer timer(context_.counters.invert_seconds);
      if (in_batches_) {
        collect(factor_index, damping.at(side));
        continue;
      }
      invert(factor_index, damping.at(side));
    }
    const ScopedTimer timer(context_.counters.distribute_seconds);
    inverse_exchange_.send(factor_index, inverses_[factor_index]);
  }
  // Where nobody else needs the inverses, others wait for what is made of them.
  const int layer = accumulator_->layouts()[first_factor].layer;
  if (overlaps_ && plan_.workers[core::index(layer)] == 1) {
    ready(layer);
  }
}

// Puts a factor off until all are collected; a diagonal one is inverted at once.
void InverseUpdate::collect(std::size_t factor_index, const at::Tensor& damping) {
  const FactorLayout& layout = accumulator_->layouts()[factor_index];
  if (layout.diagonal) {
    inverses_[factor_index] = inverter_.invertDiagonal(factor_index, damping);
    return;
  }
  const at::Tensor factor = accumulator_->unpacked(inverter_.mean(factor_index), layout);
  collected_.push_back({factor, damping, plan_.factors[factor_index].everyone_inverts});
  collected_from_.push_back(factor_index);
}

void InverseUpdate::invertCollected() {
  if (!in_batches_) {
    return;
  }
  {
    const ScopedTimer timer(context_.counters.invert_seconds);
    const std::vector<FactorToInvert> factors = std::exchange(collected_, {});
    const std::vector<std::size_t> indices = std::exchange(collected_from_, {});
    std::vector<FactorInverse> made = invertFactors(factors, context_.options.form, context_.counters.failures);
    for (std::size_t i = 0; i < made.size(); ++i) {
      if (made[i].defined()) {
        inverses_[indices[i]] = std::move(made[i]);
      }
    }
  }
  const ScopedTimer timer(context_.counters.distribute_seconds);
  for (std::size_t factor_index = 0; factor_index < inverses_.size(); ++factor_index) {
    inverse_exchange_.send(factor_index, inverses_[factor_index]);
  }
}

// Waits for buckets and inverts what has come: first those that have a factor of a layer that this rank inverts.
void InverseUpdate::invertBuckets(const Ready& ready) {
  const std::size_t factor_count = accumulator_->layouts().size();
  std::size_t next = 0;
  std::size_t begin = 0;
  for (std::size_t bucket = 0; bucket < factors_.started(); ++bucket) {
    const std::size_t end = core::index(plan_.fusion_ends[bucket]);
    bool needed = false;
    for (std::size_t factor_index = begin; factor_index < end; ++factor_index) {
      needed = needed || invertsHere(factor_index) || invertsHere(factor_index ^ 1U);
    }
    if (needed) {
      const ScopedTimer timer(context_.counters.exchange_wait_seconds);
      factors_.waitForBucket(bucket);
    }
    for (; overlaps_ && next + 1 < end; next += 2) {
      invertLayer(next, ready);
    }
    if (overlaps_ && next > kOnTheirWay) {  // instead of idling until the next bucket has come
      takeInverses(next - kOnTheirWay, ready);
    }
    begin = end;
  }
  for (; next < factor_count; next += 2) {
    invertLayer(next, ready);
  }
  const ScopedTimer timer(context_.counters.exchange_wait_seconds);
  factors_.waitForBuckets();
}

// Waits for other ranks' inverses up to factor `end`; the layers for which they come are ready.
void InverseUpdate::takeInverses(std::size_t end, const Ready& ready) {
  for (; taken_ < end; ++taken_) {
    {
      const ScopedTimer timer(context_.counters.distribute_seconds);
      inverse_exchange_.take(taken_, inverses_[taken_]);
    }
    if (overlaps_ && taken_ % 2 == 1) {
      ready(accumulator_->layouts()[taken_].layer);
    }
  }
}

// The rest of them. Where all come together, they are taken with one question to the device.
void InverseUpdate::finishInverses(const Ready& ready) {
  if (overlaps_) {
    takeInverses(inverses_.size(), ready);
  }
  const ScopedTimer timer(context_.counters.distribute_seconds);
  inverse_exchange_.flush();
  if (!overlaps_) {
    inverse_exchange_.takeAll(inverses_);
  }
  inverse_exchange_.finish();
}

FactorInverse InverseUpdate::ofOwner(std::size_t factor_index) {
  FactorInverse inverse = inverses_[factor_index];
  if (!context_.comm) {
    return inverse;
  }
  const FactorLayout& layout = accumulator_->layouts()[factor_index];
  const core::FactorPlan& factor = plan_.factors[factor_index];
  const int owner = factor.everyone_inverts ? 0 : factor.owner;
  const at::Tensor has = at::full({1}, inverse.defined() ? 1 : 0, at::kLong);
  context_.comm->broadcast(has, owner)->wait();
  if (has.item<std::int64_t>() == 0) {
    return {};
  }
  if (owner != context_.rank) {
    const at::TensorOptions options = accumulator_->options();
    inverse.matrix =
        layout.diagonal ? at::empty({layout.dim}, options) : at::empty({layout.count, layout.dim, layout.dim}, options);
    inverse.values = layout.diagonal || context_.options.form == InverseForm::kInverse
                         ? at::Tensor()
                         : at::empty({layout.count, layout.dim}, options);
  }
  context_.comm->broadcast(inverse.matrix, owner)->wait();
  if (inverse.values.defined()) {
    context_.comm->broadcast(inverse.values, owner)->wait();
  }
  return inverse;
}

void InverseUpdate::load(std::size_t factor_index, const FactorInverse& inverse) {
  const int layer = accumulator_->layouts()[factor_index].layer;
  const bool used = plan_.preconditions(context_.rank, layer) || invertsHere(factor_index);
  const auto copy = [&](const at::Tensor& from) {
    return from.defined() ? from.to(accumulator_->options(), false, true).contiguous() : at::Tensor();
  };
  inverses_[factor_index] =
      used && inverse.defined() ? FactorInverse{copy(inverse.matrix), copy(inverse.values)} : FactorInverse{};
}

std::size_t InverseUpdate::bytes() const {
  std::size_t bytes = inverse_exchange_.bytes();
  for (const FactorInverse& inverse : inverses_) {
    bytes += inverse.matrix.defined() ? inverse.matrix.nbytes() : 0;
    bytes += inverse.values.defined() ? inverse.values.nbytes() : 0;
  }
  return bytes;
}

}  // namespace torchext
