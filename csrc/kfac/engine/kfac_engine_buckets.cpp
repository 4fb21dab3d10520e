// Factors on their way: what leaves when, and how a step ends that will not use it.
#include <algorithm>

#include "core/base/check.h"
#include "kfac/base/engine_guards.h"
#include "kfac/base/scoped_timer.h"
#include "kfac/comm/kfac_tags.h"
#include "kfac/engine/kfac_engine.h"

namespace torchext {
namespace {

enum StepVote : std::int64_t { kLeavesStep, kTakesStep, kTakesStepAgain };

}  // namespace

bool KfacEngine::exchanging() const { return exchange_ && updatesInverses(); }

void KfacEngine::prepare(std::size_t factor_index, double loss_scale) {
  if (prepared_[factor_index]) {
    return;
  }
  prepared_[factor_index] = true;
  const FactorLayout& place = accumulator_->layouts()[factor_index];
  if (accumulator_->calls(place.layer) == 0) {
    accumulator_->slice(payload_, place).copy_(accumulator_->slice(accumulator_->running(), place));
  } else {
    accumulator_->preview(place, currentDecay(), loss_scale, payload_);
  }
}

void KfacEngine::startBuckets(bool overlapped) {
  if (throughMemory()) {
    return;
  }
  const auto& ends = plan_.fusion_ends;
  while (started_ < ends.size()) {
    const std::size_t begin = started_ == 0 ? 0 : core::index(ends[started_ - 1]);
    const std::size_t end = core::index(ends[started_]);
    const auto from = prepared_.begin() + static_cast<std::ptrdiff_t>(begin);
    if (!std::all_of(from, prepared_.begin() + static_cast<std::ptrdiff_t>(end), [](bool done) { return done; })) {
      return;
    }
    const FactorLayout& first = accumulator_->layouts()[begin];
    const FactorLayout& last = accumulator_->layouts()[end - 1];
    const at::Tensor bucket = payload_.narrow(0, first.offset, last.offset + last.size - first.offset);
    KfacExchange::Sum sum;  // of kOwnersOwn: there is nothing to wait for
    if (plan_.factors[begin].exchange == core::FactorExchange::kAllReduce) {
      sum = exchange_->allReduce(bucket);
    } else if (plan_.factors[begin].exchange == core::FactorExchange::kReduceToOwner) {
      sum = exchange_->reduce(bucket, plan_.factors[begin].owner, kfac_tags::kSums + static_cast<int>(started_),
                              sharesOf(begin, bucket.numel()));
    }
    if (invertsInBackground()) {
      if (started_ == 0) {
        followed_damping_ = options_.damping;
      }
      if (!background_inverses_) {
        background_inverses_ = std::make_unique<BackgroundInverses>(exchange_->waits());
      }
      background_inverses_->follow(std::move(sum), invertedAfter(end), inverter_, followed_damping_);
    } else {
      sums_.push_back(std::move(sum));
    }
    ++started_;
    ++stats_.runs;
    stats_.runs_overlapped += overlapped ? 1 : 0;
  }
}

// Where the other ranks' shares of a bucket come that this rank owns; elsewhere undefined.
at::Tensor KfacEngine::sharesOf(std::size_t first_factor, std::int64_t elements) const {
  return share_place_[first_factor] < 0
             ? at::Tensor()
             : shares_.narrow(0, share_place_[first_factor] * (ranks_ - 1), elements * (ranks_ - 1));
}

// Sends what has not left yet.
void KfacEngine::startRest(double loss_scale) {
  {
    const ScopedTimer timer(stats_.factor_seconds);
    for (std::size_t factor_index = 0; factor_index < prepared_.size(); ++factor_index) {
      prepare(factor_index, loss_scale);
    }
  }
  const ScopedTimer timer(stats_.exchange_wait_seconds);
  startBuckets(/*overlapped=*/false);
}

// All ranks take a step, or none does. If they differ, what has been sent comes to its end on all of them, the step is
// forgotten, and all throw. Returns whether a rank has sent factors that are not those of the whole step, so that all
// must send again. Each rank says besides how many rows its layers have had.
bool KfacEngine::agreeOnStep(bool takes_step) {
  const StepVote own = !takes_step ? kLeavesStep : stale_ ? kTakesStepAgain : kTakesStep;
  const at::Tensor said = at::cat({at::full({1}, static_cast<std::int64_t>(own), at::kLong), ownRowCounts()});
  const at::Tensor all = ofAllRanks(said, kfac_tags::kStepVote);
  all_row_counts_ = all.narrow(1, 1, said.numel() - 1);
  const at::Tensor votes_of_all = all.select(1, 0).contiguous();
  const auto* votes = votes_of_all.const_data_ptr<std::int64_t>();
  const auto* end = votes + ranks_;
  const auto* other = std::find_if(votes, end, [&](auto vote) { return (vote != kLeavesStep) != takes_step; });
  if (other == end) {
    return std::find(votes, end, kTakesStepAgain) != end;
  }
  waitForBuckets();
  endBuckets();
  forgetStep();
  const auto rank = static_cast<int>(other - votes);
  const bool ours = !takes_step;
  C10_THROW_ERROR(DistBackendError,
                  c10::str("torchext.optim: rank ", ours ? rank_ : rank, " left out step ", stats_.steps,
                           " (cleared its gradients without step()), rank ", ours ? rank : rank_,
                           " did not; step() is collective: take or leave it on all ranks alike, for example by an "
                           "all-reduce of the condition"));
}

// Sends a step's factors and returns once all ranks take the step, or throws on all. Nothing is changed before that,
// and nothing leaves that a rank without this step would not receive.
void KfacEngine::sendFactors(double loss_scale) {
  startRest(loss_scale);
  bool again = false;
  {
    const ScopedTimer timer(stats_.exchange_wait_seconds);
    again = agreeOnStep(/*takes_step=*/true);
    if (again) {
      waitForBuckets();
      endBuckets();
    }
  }
  if (again) {
    startRest(loss_scale);
  }
  if (throughMemory()) {
    const ScopedTimer timer(stats_.exchange_wait_seconds);
    sumThroughMemory();
  }
}

// All factors at once: of each only what this rank needs the sum of.
void KfacEngine::sumThroughMemory() {
  const auto& layouts = accumulator_->layouts();
  bool summed = false;
  std::vector<core::Span> spans;
  for (std::size_t i = 0; i < layouts.size(); ++i) {
    const core::FactorPlan& factor = plan_.factors[i];
    summed = summed || factor.exchange != core::FactorExchange::kOwnersOwn;
    if (factor.exchange == core::FactorExchange::kAllReduce ||
        (factor.exchange == core::FactorExchange::kReduceToOwner && factor.owner == rank_)) {
      spans.push_back({static_cast<std::size_t>(layouts[i].offset), static_cast<std::size_t>(layouts[i].size)});
    }
  }
  if (summed) {
    exchange_->sumParts(payload_, spans);
  }
}

void KfacEngine::waitForBucket(std::size_t bucket) {
  if (invertsInBackground()) {
    background_inverses_->waitForRuns(bucket + 1);
  } else {
    sums_[bucket].wait();
  }
}

void KfacEngine::waitForBuckets() {
  if (background_inverses_) {
    background_inverses_->waitForRuns(background_inverses_->runs());
  }
  for (auto& sum : sums_) {
    sum.wait();
  }
}

void KfacEngine::endBuckets() {
  if (background_inverses_) {
    background_inverses_->end();
  }
  sums_.clear();
  started_ = 0;
  followed_ = 0;
  std::fill(prepared_.begin(), prepared_.end(), false);
}

void KfacEngine::forgetStep() {
  accumulator_->discard();
  forgetDeferred();
  forgetRows();
  endPass();
}

// Ends a step without its sums. `sent`: a backward pass may have sent some of them. Every rank then sends all, for
// nothing: a collective that one rank leaves out would be met by its next one.
void KfacEngine::drop(bool sent) {
  forgetStep();
  if (!exchanging() || !sent) {
    return;
  }
  startRest(/*loss_scale=*/1);
  agreeOnStep(/*takes_step=*/false);
  waitForBuckets();
  endBuckets();
}

void KfacEngine::discard() {
  const EngineGuards guards;
  const ReentrancyGuard guard(*this, "discard");
  drop(seen_backward_);
}

}  // namespace torchext
