// What KfacEngine does in steps that update inverses.
#include <cmath>

#include "core/check.h"
#include "optim/factor_batch.h"
#include "optim/kfac_engine.h"
#include "optim/timed.h"

namespace torchext {

using core::FactorExchange;

bool KfacEngine::invertsHere(std::size_t slot) const {
  return plan_.factors[slot].everyone_inverts || plan_.factors[slot].owner == rank_;
}

bool KfacEngine::worksOn(int layer) const {
  const auto i = core::index(layer);
  return core::KfacPlan::isWorker(rank_, plan_.layer_owner[i], plan_.workers[i], ranks_);
}

// The mean over ranks, once it has come; of this rank alone without a group.
at::Tensor KfacEngine::meanFactor(std::size_t slot) const {
  const FactorSlot& place = statistics_->slots()[slot];
  if (!exchange_) {
    return statistics_->slice(statistics_->running(), place);
  }
  const at::Tensor sum = statistics_->slice(payload_, place);
  return plan_.factors[slot].exchange == FactorExchange::kOwnersOwn ? sum : sum / ranks_;
}

// Whether a rank that owns one factor of a layer may not have the other, of which it needs the trace.
bool KfacEngine::tracesTravel() const {
  for (std::size_t i = 0; i + 1 < plan_.factors.size(); i += 2) {
    if (plan_.factors[i].exchange == FactorExchange::kReduceToOwner &&
        plan_.factors[i].owner != plan_.factors[i + 1].owner) {
      return options_.form == InverseForm::kInverse;
    }
  }
  return false;
}

// Of a factor whose run has come, its mean over ranks.
at::Tensor KfacEngine::tracesOf(std::size_t slot) const {
  const auto& slots = statistics_->slots();
  if (!traces_.defined()) {
    return statistics_->traces(meanFactor(slot), slots[slot]);
  }
  std::int64_t offset = 0;
  for (std::size_t i = 0; i < slot; ++i) {
    offset += slots[i].count;
  }
  return traces_.narrow(0, offset, slots[slot].count) / ranks_;
}

// Factored Tikhonov: pi balances the damping of a layer's two factors by their mean eigenvalues.
at::Tensor KfacEngine::dampingOf(const at::Tensor& own_mean, const at::Tensor& other_mean) const {
  at::Tensor pi = at::sqrt(own_mean / other_mean);
  pi = at::where(at::isfinite(pi).logical_and(pi > 0), pi, at::ones_like(pi));
  return (pi * std::sqrt(options_.damping)).to(statistics_->type());
}

FactorInverse KfacEngine::diagonalInverse(const at::Tensor& factor, const at::Tensor& damping) const {
  return {options_.form == InverseForm::kEigen ? factor.clamp_min(0) : (factor + damping).reciprocal(), {}};
}

void KfacEngine::invert(std::size_t slot, const at::Tensor& damping) {
  const FactorSlot& place = statistics_->slots()[slot];
  const at::Tensor factor = statistics_->unpacked(meanFactor(slot), place);
  FactorInverse inverse;
  if (place.diagonal) {
    inverse = diagonalInverse(factor, damping);
  } else if (options_.form == InverseForm::kEigen) {
    inverse = decomposeFactor(factor, stats_.failures);
  } else {
    inverse = invertFactor(factor, damping, stats_.failures);
  }
  if (inverse.defined()) {
    inverses_[slot] = std::move(inverse);
  }
}

// The two factors of a layer, as far as this rank inverts them.
void KfacEngine::invertLayer(std::size_t first_slot) {
  if (!invertsHere(first_slot) && !invertsHere(first_slot + 1)) {
    return;
  }
  const auto damping = dampingOfLayer(first_slot);
  for (const std::size_t side : {0, 1}) {
    const std::size_t slot = first_slot + side;
    if (invertsHere(slot)) {
      {
        const Timed timed(stats_.invert_seconds);
        invert(slot, damping.at(side));
      }
      sendInverse(slot);
    }
  }
}

// Of the two factors of a layer, each [count]; undefined where it belongs to the product (kEigen).
std::array<at::Tensor, 2> KfacEngine::dampingOfLayer(std::size_t first_slot) {
  if (options_.form == InverseForm::kEigen) {
    return {};
  }
  traces_sum_.wait();
  std::array<at::Tensor, 2> means;
  for (const std::size_t side : {0, 1}) {
    const std::size_t slot = first_slot + side;
    means.at(side) = tracesOf(slot) / static_cast<double>(statistics_->slots()[slot].dim);
  }
  return {dampingOf(means[0], means[1]), dampingOf(means[1], means[0])};
}

// All at once, in batches.
void KfacEngine::invertQueued() {
  {
    const Timed timed(stats_.exchange_wait_seconds);
    waitForRuns();
  }
  const Timed timed(stats_.invert_seconds);
  const auto& slots = statistics_->slots();
  std::vector<FactorToInvert> factors;
  std::vector<std::size_t> slot_of;
  for (std::size_t first = 0; first < slots.size(); first += 2) {
    if (!invertsHere(first) && !invertsHere(first + 1)) {
      continue;
    }
    const auto damping = dampingOfLayer(first);
    for (const std::size_t side : {0, 1}) {
      const std::size_t slot = first + side;
      if (!invertsHere(slot)) {
        continue;
      }
      const at::Tensor factor = statistics_->unpacked(meanFactor(slot), slots[slot]);
      if (slots[slot].diagonal) {
        inverses_[slot] = diagonalInverse(factor, damping.at(side));
      } else {
        factors.push_back({factor, damping.at(side), plan_.factors[slot].everyone_inverts});
        slot_of.push_back(slot);
      }
    }
  }
  std::vector<FactorInverse> made = invertFactors(factors, options_.form, stats_.failures);
  for (std::size_t i = 0; i < made.size(); ++i) {
    if (made[i].defined()) {
      inverses_[slot_of[i]] = std::move(made[i]);
    }
  }
}

// Waits for runs and inverts what has come: first those that have a factor of a layer that this rank inverts.
void KfacEngine::invertRuns() {
  const std::size_t slots = statistics_->slots().size();
  const bool at_once = plan_.strategy != core::KfacStrategy::kDkfac;
  std::size_t next = 0;
  std::size_t begin = 0;
  for (std::size_t run = 0; run < sums_.size(); ++run) {
    const std::size_t end = core::index(plan_.fusion_ends[run]);
    bool needed = false;
    for (std::size_t slot = begin; slot < end; ++slot) {
      needed = needed || invertsHere(slot) || invertsHere(slot ^ 1U);
    }
    if (needed) {
      const Timed timed(stats_.exchange_wait_seconds);
      sums_[run].wait();
    }
    for (; at_once && next + 1 < end; next += 2) {
      invertLayer(next);
    }
    begin = end;
  }
  for (; next < slots; next += 2) {
    invertLayer(next);
  }
  const Timed timed(stats_.exchange_wait_seconds);
  waitForRuns();
}

void KfacEngine::updateInverses() {
  if (stats_.steps % options_.inverse_update_steps != 0) {  // sent for nothing: exchange_always
    const Timed timed(stats_.exchange_wait_seconds);
    waitForRuns();
    endRuns();
    return;
  }
  if (exchange_ && tracesTravel()) {
    std::vector<at::Tensor> own;
    for (const FactorSlot& slot : statistics_->slots()) {
      own.push_back(statistics_->traces(statistics_->slice(statistics_->running(), slot), slot));
    }
    traces_ = at::cat(own);
    if (throughMemory()) {
      exchange_->sumParts(traces_, {{0, static_cast<std::size_t>(traces_.numel())}});
    } else {
      traces_sum_ = exchange_->allReduce(traces_);
    }
  }
  if (queued_) {
    invertQueued();
    endRuns();
    exchangeInverses();
  } else {
    receiveInverses();
    invertRuns();
    endRuns();
    takeInverses();
  }
  traces_sum_.wait();  // where this rank inverts nothing
  traces_ = at::Tensor();
  ++stats_.inverse_updates;
}

}  // namespace torchext
