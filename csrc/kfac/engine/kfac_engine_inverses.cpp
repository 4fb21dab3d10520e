// What KfacEngine does in steps that update inverses.
#include "core/base/check.h"
#include "kfac/base/scoped_timer.h"
#include "kfac/engine/kfac_engine.h"
#include "kfac/inverses/factor_batch.h"

namespace torchext {

namespace {

// Inverses of the last so many factors are left the time to come while this rank makes its own of later ones, for which
// others wait. Eight layers 1024 wide over four hosts (kfac_network.py), milliseconds a step: 1223 with 2,
// 1233 with 4, 1209 with 8, 1228 with 12, all within what runs vary by; making none before the last bucket, 1349.
constexpr std::size_t kOnTheirWay = 8;

}  // namespace

bool KfacEngine::invertsHere(std::size_t factor_index) const {
  return plan_.factors[factor_index].everyone_inverts || plan_.factors[factor_index].owner == rank_;
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

// Of the mean of a factor whose bucket has come.
at::Tensor KfacEngine::tracesOf(std::size_t factor_index) const {
  const auto& layouts = accumulator_->layouts();
  if (!traces_.defined()) {
    return inverter_.traces(factor_index);
  }
  std::int64_t offset = 0;
  for (std::size_t i = 0; i < factor_index; ++i) {
    offset += layouts[i].count;
  }
  return traces_.narrow(0, offset, layouts[factor_index].count) / ranks_;
}

// The inversions that the arrival of a bucket makes possible, as far as they need no more than factors. end: of its
// factors.
std::vector<std::size_t> KfacEngine::invertedAfter(std::size_t end) {
  std::vector<std::size_t> factor_indices;
  for (; followed_ + 1 < end; followed_ += 2) {
    for (const std::size_t factor_index : {followed_, followed_ + 1}) {
      if (!tracesTravel() && invertsHere(factor_index)) {
        factor_indices.push_back(factor_index);
      }
    }
  }
  return factor_indices;
}

// Whether they were asked for, and with the damping that is in force now.
bool KfacEngine::madeInBackground() const {
  return invertsInBackground() && !tracesTravel() && followed_damping_ == options_.damping;
}

void KfacEngine::invert(std::size_t factor_index, const at::Tensor& damping) {
  FactorInverse inverse = madeInBackground() ? background_inverses_->collect(factor_index, stats_.failures)
                                             : inverter_.invert(factor_index, damping, stats_.failures);
  if (inverse.defined()) {
    inverses_[factor_index] = std::move(inverse);
  }
}

// The two factors of a layer, as far as this rank inverts them.
void KfacEngine::invertLayer(std::size_t first_factor) {
  if (!invertsHere(first_factor) && !invertsHere(first_factor + 1)) {
    return;
  }
  const auto damping = madeInBackground() ? std::array<at::Tensor, 2>() : dampingOfLayer(first_factor);
  for (const std::size_t side : {0, 1}) {
    const std::size_t factor_index = first_factor + side;
    if (invertsHere(factor_index)) {
      {
        const ScopedTimer timer(stats_.invert_seconds);
        invert(factor_index, damping.at(side));
      }
      const ScopedTimer timer(stats_.distribute_seconds);
      inverse_exchange_->send(factor_index, inverses_[factor_index]);
    }
  }
  // Where nobody else needs the inverses, others wait for what is made of them.
  const int layer = accumulator_->layouts()[first_factor].layer;
  if (overlaps() && plan_.workers[core::index(layer)] == 1) {
    makeDirection(layer);
  }
}

// Of the two factors of a layer, each [count]; undefined where it belongs to the product (kEigen).
std::array<at::Tensor, 2> KfacEngine::dampingOfLayer(std::size_t first_factor) {
  if (options_.form == InverseForm::kEigen) {
    return {};
  }
  traces_sum_.wait();
  return inverter_.dampings(first_factor, {tracesOf(first_factor), tracesOf(first_factor + 1)}, options_.damping);
}

// All at once, in batches.
void KfacEngine::invertOnDevice() {
  {
    const ScopedTimer timer(stats_.exchange_wait_seconds);
    waitForBuckets();
  }
  const ScopedTimer timer(stats_.invert_seconds);
  const auto& layouts = accumulator_->layouts();
  std::vector<FactorToInvert> factors;
  std::vector<std::size_t> index_of;
  for (std::size_t first = 0; first < layouts.size(); first += 2) {
    if (!invertsHere(first) && !invertsHere(first + 1)) {
      continue;
    }
    const auto damping = dampingOfLayer(first);
    for (const std::size_t side : {0, 1}) {
      const std::size_t factor_index = first + side;
      if (!invertsHere(factor_index)) {
        continue;
      }
      if (layouts[factor_index].diagonal) {
        inverses_[factor_index] = inverter_.invertDiagonal(factor_index, damping.at(side));
      } else {
        const at::Tensor factor = accumulator_->unpacked(inverter_.mean(factor_index), layouts[factor_index]);
        factors.push_back({factor, damping.at(side), plan_.factors[factor_index].everyone_inverts});
        index_of.push_back(factor_index);
      }
    }
  }
  std::vector<FactorInverse> made = invertFactors(factors, options_.form, stats_.failures);
  for (std::size_t i = 0; i < made.size(); ++i) {
    if (made[i].defined()) {
      inverses_[index_of[i]] = std::move(made[i]);
    }
  }
}

// Waits for buckets and inverts what has come: first those that have a factor of a layer that this rank inverts.
void KfacEngine::invertBuckets() {
  const std::size_t factor_count = accumulator_->layouts().size();
  std::size_t next = 0;
  std::size_t begin = 0;
  for (std::size_t bucket = 0; bucket < started_; ++bucket) {
    const std::size_t end = core::index(plan_.fusion_ends[bucket]);
    bool needed = false;
    for (std::size_t factor_index = begin; factor_index < end; ++factor_index) {
      needed = needed || invertsHere(factor_index) || invertsHere(factor_index ^ 1U);
    }
    if (needed) {
      const ScopedTimer timer(stats_.exchange_wait_seconds);
      waitForBucket(bucket);
    }
    for (; overlaps() && next + 1 < end; next += 2) {
      invertLayer(next);
    }
    if (overlaps() && next > kOnTheirWay) {  // instead of idling until the next bucket has come
      takeInverses(next - kOnTheirWay);
    }
    begin = end;
  }
  for (; next < factor_count; next += 2) {
    invertLayer(next);
  }
  const ScopedTimer timer(stats_.exchange_wait_seconds);
  waitForBuckets();
}

// Waits for other ranks' inverses up to factor `end`, and makes the directions for which they come.
void KfacEngine::takeInverses(std::size_t end) {
  for (; taken_ < end; ++taken_) {
    {
      const ScopedTimer timer(stats_.distribute_seconds);
      inverse_exchange_->take(taken_, inverses_[taken_]);
    }
    if (overlaps() && taken_ % 2 == 1) {
      makeDirection(accumulator_->layouts()[taken_].layer);
    }
  }
}

// The rest of them.
void KfacEngine::finishInverses() {
  if (throughMemory()) {
    const ScopedTimer timer(stats_.distribute_seconds);
    inverse_exchange_->gather();
  }
  takeInverses(inverses_.size());
  const ScopedTimer timer(stats_.distribute_seconds);
  inverse_exchange_->finish();
}

void KfacEngine::updateInverses() {
  if (exchange_ && tracesTravel()) {
    std::vector<at::Tensor> own;
    for (const FactorLayout& layout : accumulator_->layouts()) {
      own.push_back(accumulator_->traces(accumulator_->slice(accumulator_->running(), layout), layout));
    }
    traces_ = at::cat(own);
    if (throughMemory()) {
      exchange_->sumParts(traces_, {{0, static_cast<std::size_t>(traces_.numel())}});
    } else {
      traces_sum_ = exchange_->allReduce(traces_);
    }
  }
  if (device_path_) {
    invertOnDevice();
    endBuckets();
    const ScopedTimer timer(stats_.distribute_seconds);
    inverse_exchange_->exchange(inverses_);
  } else {
    taken_ = 0;
    inverse_exchange_->expect();
    invertBuckets();
    endBuckets();
    finishInverses();
  }
  traces_sum_.wait();  // where this rank inverts nothing
  traces_ = at::Tensor();
  ++stats_.inverse_updates;
}

}  // namespace torchext
