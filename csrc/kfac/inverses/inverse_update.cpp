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

InverseUpdate::InverseUpdate(KfacContext& context, const FactorAccumulator& accumulator, FactorExchange& factors,
                             const core::KfacPlan& plan)
    : context_(context),
      accumulator_(accumulator),
      factors_(factors),
      plan_(plan),
      inverse_exchange_(plan, accumulator, context.options.form, context.comm.get()),
      inverses_(accumulator.layouts().size()),
      in_batches_(context.on_device),
      overlaps_(plan.strategy != core::KfacStrategy::kDkfac && context.overlaps() && !in_batches_) {}

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

void InverseUpdate::run(const Ready& ready) {
  if (tracesTravel()) {
    sendTraces();
  }
  taken_ = 0;
  collected_.clear();  // of an update that was interrupted
  collected_from_.clear();
  inverse_exchange_.expect();
  invertBuckets(ready);
  invertCollected();
  finishInverses(ready);
  traces_sum_.wait();  // where this rank inverts nothing
  traces_ = at::Tensor();
  ++context_.counters.inverse_updates;
}

void InverseUpdate::sendTraces() {
  std::vector<at::Tensor> own;
  for (const FactorLayout& of : accumulator_.layouts()) {
    own.push_back(accumulator_.traces(accumulator_.slice(accumulator_.running(), of), of));
  }
  traces_ = at::cat(own);
  traces_sum_ = context_.comm->addUp(traces_);
}

// Of the mean of a factor whose bucket has come, [count] in float64.
at::Tensor InverseUpdate::tracesOf(std::size_t factor_index) const {
  if (!traces_.defined()) {
    const at::Tensor sum = accumulator_.slice(factors_.summed(), layout(factor_index));
    return accumulator_.traces(sum, layout(factor_index)) / factors_.divisor(factor_index);
  }
  std::int64_t offset = 0;
  for (std::size_t i = 0; i < factor_index; ++i) {
    offset += layout(i).count;
  }
  return traces_.narrow(0, offset, layout(factor_index).count) / context_.ranks;
}

// Factored Tikhonov, of a layer's two factors by their traces: pi balances the damping by their mean eigenvalues. Each
// [count]; undefined where damping belongs to the product (kEigen).
std::array<at::Tensor, 2> InverseUpdate::dampingOfLayer(std::size_t first_factor) {
  if (context_.options.form == InverseForm::kEigen) {
    return {};
  }
  traces_sum_.wait();
  const at::Tensor outputs = tracesOf(first_factor) / static_cast<double>(layout(first_factor).dim);
  const at::Tensor inputs = tracesOf(first_factor + 1) / static_cast<double>(layout(first_factor + 1).dim);
  const double damping = context_.options.damping;
  return {accumulator_.damping(outputs, inputs, damping), accumulator_.damping(inputs, outputs, damping)};
}

// The mean, [count, dim, dim]; of a diagonal factor [dim].
at::Tensor InverseUpdate::factorOf(std::size_t factor_index) const {
  const at::Tensor sum = accumulator_.slice(factors_.summed(), layout(factor_index));
  const double divisor = factors_.divisor(factor_index);
  return accumulator_.unpacked(divisor == 1 ? sum : sum / divisor, layout(factor_index));
}

// Or puts it off until all are collected. Where LAPACK gives up, the last good inverse is used on.
void InverseUpdate::invert(std::size_t factor_index, const at::Tensor& damping) {
  const bool eigen = context_.options.form == InverseForm::kEigen;
  InverseFailures& failures = context_.counters.failures;
  const FactorLayout& of = layout(factor_index);
  FactorInverse inverse;
  if (of.diagonal) {
    const at::Tensor factor = factorOf(factor_index);
    inverse.matrix = eigen ? factor.clamp_min(0) : (factor + damping).reciprocal();
  } else if (in_batches_) {
    collected_.push_back({factorOf(factor_index), damping, plan_.factors[factor_index].everyone_inverts});
    collected_from_.push_back(factor_index);
  } else if (eigen) {
    inverse = decomposeFactor(factorOf(factor_index), failures);
  } else {
    const at::Tensor sum = accumulator_.slice(factors_.summed(), of);
    inverse = invertFactor(sum, of.dim, factors_.divisor(factor_index), damping, failures);
  }
  if (inverse.defined()) {
    inverses_[factor_index] = std::move(inverse);
  }
}

// The two factors of a layer, as far as this rank inverts them.
void InverseUpdate::invertLayer(std::size_t first_factor) {
  if (!invertsHere(first_factor) && !invertsHere(first_factor + 1)) {
    return;
  }
  const auto damping = dampingOfLayer(first_factor);
  for (const std::size_t side : {0, 1}) {
    const std::size_t factor_index = first_factor + side;
    if (!invertsHere(factor_index)) {
      continue;
    }
    {
      const ScopedTimer timer(context_.counters.invert_seconds);
      invert(factor_index, damping.at(side));
    }
    if (!in_batches_) {
      const ScopedTimer timer(context_.counters.distribute_seconds);
      inverse_exchange_.send(factor_index, inverses_[factor_index]);
    }
  }
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
  const std::size_t factor_count = accumulator_.layouts().size();
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
      invertLayer(next);
    }
    if (overlaps_ && next > kOnTheirWay) {  // instead of idling until the next bucket has come
      takeInverses(next - kOnTheirWay, ready);
    }
    begin = end;
  }
  for (; next < factor_count; next += 2) {
    invertLayer(next);
  }
  const ScopedTimer timer(context_.counters.exchange_wait_seconds);
  factors_.endBuckets();
}

// Waits for other ranks' inverses up to factor `end`; the layers for which they come are ready.
void InverseUpdate::takeInverses(std::size_t end, const Ready& ready) {
  for (; taken_ < end; ++taken_) {
    {
      const ScopedTimer timer(context_.counters.distribute_seconds);
      inverse_exchange_.take(taken_, inverses_[taken_]);
    }
    if (overlaps_ && taken_ % 2 == 1) {
      ready(layout(taken_).layer);
    }
  }
}

// The rest of them.
void InverseUpdate::finishInverses(const Ready& ready) {
  if (overlaps_) {
    takeInverses(inverses_.size(), ready);
  }
  const ScopedTimer timer(context_.counters.distribute_seconds);
  inverse_exchange_.finish(inverses_);
}

FactorInverse InverseUpdate::ofOwner(std::size_t factor_index) {
  FactorInverse inverse = inverses_[factor_index];
  if (!context_.comm) {
    return inverse;
  }
  const FactorLayout& of = layout(factor_index);
  const core::FactorPlan& factor = plan_.factors[factor_index];
  const int owner = factor.everyone_inverts ? 0 : factor.owner;
  const at::Tensor has = at::full({1}, inverse.defined() ? 1 : 0, at::kLong);
  context_.comm->broadcast(has, owner)->wait();
  if (has.item<std::int64_t>() == 0) {
    return {};
  }
  if (owner != context_.rank) {
    const at::TensorOptions options = accumulator_.options();
    inverse.matrix = of.diagonal ? at::empty({of.dim}, options) : at::empty({of.count, of.dim, of.dim}, options);
    inverse.values = of.diagonal || context_.options.form == InverseForm::kInverse
                         ? at::Tensor()
                         : at::empty({of.count, of.dim}, options);
  }
  context_.comm->broadcast(inverse.matrix, owner)->wait();
  if (inverse.values.defined()) {
    context_.comm->broadcast(inverse.values, owner)->wait();
  }
  return inverse;
}

void InverseUpdate::load(std::size_t factor_index, const FactorInverse& inverse) {
  const int layer = layout(factor_index).layer;
  const bool used = plan_.preconditions(context_.rank, layer) || invertsHere(factor_index);
  const auto copy = [&](const at::Tensor& from) {
    return from.defined() ? from.to(accumulator_.options(), false, true).contiguous() : at::Tensor();
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
