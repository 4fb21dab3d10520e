// What KfacEngine does in steps that update inverses.
#include "core/base/check.h"
#include "kfac/base/timed.h"
#include "kfac/engine/kfac_engine.h"
#include "kfac/inverses/factor_batch.h"

namespace torchext {

namespace {

// Inverses of the last so many slots are left the time to come while this rank makes its own of later ones, for which
// others wait. Eight layers 1024 wide over four hosts (kfac_network.py), milliseconds a step: 1223 with 2,
// 1233 with 4, 1209 with 8, 1228 with 12, all within what runs vary by; making none before the last run, 1349.
constexpr std::size_t kOnTheirWay = 8;

}  // namespace

bool KfacEngine::invertsHere(std::size_t slot) const {
  return plan_.factors[slot].everyone_inverts || plan_.factors[slot].owner == rank_;
}

bool KfacEngine::worksOn(int layer) const {
  const auto i = core::index(layer);
  return core::KfacPlan::isWorker(rank_, plan_.layer_owner[i], plan_.workers[i], ranks_);
}

// Whether a part of the work begins when what it needs is there, whatever else is not: not in the plain algorithm.
bool KfacEngine::overlaps() const { return plan_.strategy != core::KfacStrategy::kDkfac && !throughMemory(); }

// Whether a rank that owns one factor of a layer may not have the other, of which it needs the trace.
bool KfacEngine::tracesTravel() const {
  for (std::size_t i = 0; i + 1 < plan_.factors.size(); i += 2) {
    if (plan_.factors[i].exchange == core::FactorExchange::kReduceToOwner &&
        plan_.factors[i].owner != plan_.factors[i + 1].owner) {
      return options_.form == InverseForm::kInverse;
    }
  }
  return false;
}

// Of the mean of a factor whose run has come.
at::Tensor KfacEngine::tracesOf(std::size_t slot) const {
  const auto& slots = statistics_->slots();
  if (!traces_.defined()) {
    return inverter_.traces(slot);
  }
  std::int64_t offset = 0;
  for (std::size_t i = 0; i < slot; ++i) {
    offset += slots[i].count;
  }
  return traces_.narrow(0, offset, slots[slot].count) / ranks_;
}

// The inversions that the arrival of a run makes possible, as far as they need no more than factors. end: of its slots.
std::vector<std::size_t> KfacEngine::invertedAfter(std::size_t end) {
  std::vector<std::size_t> slots;
  const bool used = updatesInverses() && !tracesTravel();
  for (; followed_ + 1 < end; followed_ += 2) {
    for (const std::size_t slot : {followed_, followed_ + 1}) {
      if (used && invertsHere(slot)) {
        slots.push_back(slot);
      }
    }
  }
  return slots;
}

// Whether they were asked for, and with the damping that is in force now.
bool KfacEngine::madeEarly() const { return followsRuns() && !tracesTravel() && followed_damping_ == options_.damping; }

void KfacEngine::invert(std::size_t slot, const at::Tensor& damping) {
  FactorInverse inverse =
      madeEarly() ? early_inverses_->collect(slot, stats_.failures) : inverter_.invert(slot, damping, stats_.failures);
  if (inverse.defined()) {
    inverses_[slot] = std::move(inverse);
  }
}

// The two factors of a layer, as far as this rank inverts them.
void KfacEngine::invertLayer(std::size_t first_slot) {
  if (!invertsHere(first_slot) && !invertsHere(first_slot + 1)) {
    return;
  }
  const auto damping = madeEarly() ? std::array<at::Tensor, 2>() : dampingOfLayer(first_slot);
  for (const std::size_t side : {0, 1}) {
    const std::size_t slot = first_slot + side;
    if (invertsHere(slot)) {
      {
        const Timed timed(stats_.invert_seconds);
        invert(slot, damping.at(side));
      }
      const Timed timed(stats_.distribute_seconds);
      inverse_travel_->send(slot, inverses_[slot]);
    }
  }
  // Where nobody else needs the inverses, others wait for what is made of them.
  const int layer = statistics_->slots()[first_slot].layer;
  if (overlaps() && plan_.workers[core::index(layer)] == 1) {
    makeDirection(layer);
  }
}

// Of the two factors of a layer, each [count]; undefined where it belongs to the product (kEigen).
std::array<at::Tensor, 2> KfacEngine::dampingOfLayer(std::size_t first_slot) {
  if (options_.form == InverseForm::kEigen) {
    return {};
  }
  traces_sum_.wait();
  return inverter_.dampings(first_slot, {tracesOf(first_slot), tracesOf(first_slot + 1)}, options_.damping);
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
      if (slots[slot].diagonal) {
        inverses_[slot] = inverter_.invertDiagonal(slot, damping.at(side));
      } else {
        const at::Tensor factor = statistics_->unpacked(inverter_.mean(slot), slots[slot]);
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
  std::size_t next = 0;
  std::size_t begin = 0;
  for (std::size_t run = 0; run < started_; ++run) {
    const std::size_t end = core::index(plan_.fusion_ends[run]);
    bool needed = false;
    for (std::size_t slot = begin; slot < end; ++slot) {
      needed = needed || invertsHere(slot) || invertsHere(slot ^ 1U);
    }
    if (needed) {
      const Timed timed(stats_.exchange_wait_seconds);
      waitForRun(run);
    }
    for (; overlaps() && next + 1 < end; next += 2) {
      invertLayer(next);
    }
    if (overlaps() && next > kOnTheirWay) {  // instead of idling until the next run has come
      takeInverses(next - kOnTheirWay);
    }
    begin = end;
  }
  for (; next < slots; next += 2) {
    invertLayer(next);
  }
  const Timed timed(stats_.exchange_wait_seconds);
  waitForRuns();
}

// Waits for other ranks' inverses up to slot `end`, and makes the directions for which they come.
void KfacEngine::takeInverses(std::size_t end) {
  for (; taken_ < end; ++taken_) {
    {
      const Timed timed(stats_.distribute_seconds);
      inverse_travel_->take(taken_, inverses_[taken_]);
    }
    if (overlaps() && taken_ % 2 == 1) {
      makeDirection(statistics_->slots()[taken_].layer);
    }
  }
}

// The rest of them.
void KfacEngine::finishInverses() {
  if (throughMemory()) {
    const Timed timed(stats_.distribute_seconds);
    inverse_travel_->gather();
  }
  takeInverses(inverses_.size());
  const Timed timed(stats_.distribute_seconds);
  inverse_travel_->finish();
}

void KfacEngine::updateInverses() {
  if (!updatesInverses()) {  // sent for nothing: exchange_always
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
    const Timed timed(stats_.distribute_seconds);
    inverse_travel_->exchange(inverses_);
  } else {
    taken_ = 0;
    inverse_travel_->expect();
    invertRuns();
    endRuns();
    finishInverses();
  }
  traces_sum_.wait();  // where this rank inverts nothing
  traces_ = at::Tensor();
  ++stats_.inverse_updates;
}

}  // namespace torchext
