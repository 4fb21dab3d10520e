// What KfacEngine does in steps that update inverses.
#include <array>
#include <cmath>

#include "core/check.h"
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
  const FactorSlot& place = statistics_.slots()[slot];
  if (!exchange_) {
    return statistics_.slice(statistics_.running(), place);
  }
  const at::Tensor sum = statistics_.slice(payload_, place);
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
  const auto& slots = statistics_.slots();
  if (!traces_.defined()) {
    return tracesOfFactor(meanFactor(slot), slots[slot]);
  }
  std::int64_t offset = 0;
  for (std::size_t i = 0; i < slot; ++i) {
    offset += slots[i].count;
  }
  return traces_.narrow(0, offset, slots[slot].count) / ranks_;
}

void KfacEngine::invert(std::size_t slot, const at::Tensor& own_mean, const at::Tensor& other_mean) {
  const FactorSlot& place = statistics_.slots()[slot];
  const at::Tensor factor = unpackedFactor(meanFactor(slot), place);
  FactorInverse inverse;
  if (options_.form == InverseForm::kEigen) {
    inverse = place.diagonal ? FactorInverse{factor.clamp_min(0), {}} : decomposeFactor(factor, stats_.failures);
  } else {
    // Factored Tikhonov: pi balances the damping of the two factors by their mean eigenvalues.
    at::Tensor pi = at::sqrt(own_mean / other_mean);
    pi = at::where(at::isfinite(pi).logical_and(pi > 0), pi, at::ones_like(pi));
    const at::Tensor damping = (pi * std::sqrt(options_.damping)).to(factor.scalar_type());
    inverse = place.diagonal ? FactorInverse{(factor + damping).reciprocal(), {}}
                             : invertFactor(factor, damping, stats_.failures);
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
  std::array<at::Tensor, 2> means;
  if (options_.form == InverseForm::kInverse) {
    if (traces_work_) {
      traces_work_->wait();
      traces_work_.reset();
    }
    for (const std::size_t side : {0, 1}) {
      const std::size_t slot = first_slot + side;
      means.at(side) = tracesOf(slot) / static_cast<double>(statistics_.slots()[slot].dim);
    }
  }
  for (const std::size_t side : {0, 1}) {
    const std::size_t slot = first_slot + side;
    if (invertsHere(slot)) {
      {
        const Timed timed(stats_.invert_seconds);
        invert(slot, means.at(side), means.at(1 - side));
      }
      sendInverse(slot);
    }
  }
}

// Waits for runs and inverts what has come.
void KfacEngine::invertRuns() {
  const std::size_t slots = statistics_.slots().size();
  const bool at_once = plan_.strategy != core::KfacStrategy::kDkfac;
  std::size_t next = 0;
  for (std::size_t run = 0; run < works_.size(); ++run) {
    {
      const Timed timed(stats_.exchange_wait_seconds);
      if (works_[run]) {
        works_[run]->wait();
      }
    }
    for (; at_once && next + 1 < core::index(plan_.fusion_ends[run]); next += 2) {
      invertLayer(next);
    }
  }
  for (; next < slots; next += 2) {
    invertLayer(next);
  }
}

void KfacEngine::updateInverses() {
  const bool inverting = stats_.steps % options_.inverse_update_steps == 0;
  if (exchange_) {
    const Timed timed(stats_.exchange_wait_seconds);
    auto verdicts = startRest(/*takes_step=*/true);
    checkVerdicts(verdicts);  // before anything leaves that a rank without this step would not receive
  }
  if (!inverting) {  // sent for nothing: exchange_always
    const Timed timed(stats_.exchange_wait_seconds);
    waitForRuns();
    endRuns();
    return;
  }
  if (exchange_ && tracesTravel()) {
    std::vector<at::Tensor> own;
    for (const FactorSlot& slot : statistics_.slots()) {
      own.push_back(tracesOfFactor(statistics_.slice(statistics_.running(), slot), slot));
    }
    traces_ = at::cat(own);
    traces_work_ = exchange_->allReduce(traces_);
  }
  receiveInverses();
  invertRuns();
  endRuns();
  takeInverses();
  traces_work_.reset();
  traces_ = at::Tensor();
  ++stats_.inverse_updates;
}

}  // namespace torchext
