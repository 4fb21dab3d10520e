#include "kfac/factors/factor_exchange.h"

#include <algorithm>
#include <utility>

#include "core/base/check.h"
#include "kfac/base/scoped_timer.h"
#include "kfac/comm/kfac_tags.h"

namespace torchext {
namespace {

enum StepVote : std::int64_t { kLeavesStep, kTakesStep, kTakesStepAgain };

}  // namespace

FactorExchange::FactorExchange(KfacContext& context, FactorAccumulator& accumulator, const core::KfacPlan& plan)
    : context_(context),
      accumulator_(accumulator),
      plan_(plan),
      calls_(context.layers.size()),
      prepared_(accumulator.layouts().size(), false) {
  if (context_.comm) {
    payload_ = at::empty({accumulator_.elements()}, accumulator_.options());
  }
  placeShares();
}

void FactorExchange::placeShares() {
  const auto& layouts = accumulator_.layouts();
  share_place_.assign(layouts.size(), -1);
  const bool added_here = context_.comm && context_.comm->addsShares();
  std::int64_t owned = 0;
  for (std::size_t i = 0; i < layouts.size(); ++i) {
    const core::FactorPlan& factor = plan_.factors[i];
    if (added_here && factor.exchange == core::FactorExchange::kReduceToOwner && factor.owner == context_.rank) {
      share_place_[i] = owned;
      owned += layouts[i].size;
    }
  }
  if (owned > 0) {
    shares_ = at::empty({owned * (context_.ranks - 1)}, accumulator_.options());
  }
}

void FactorExchange::add(int layer, const at::Tensor& input, const at::Tensor& gradient, int backward_pass,
                         bool may_leave) {
  accumulator_.add(layer, input, gradient, backward_pass);
  const Calls& calls = calls_[core::index(layer)];
  const bool complete = context_.sendsFactors() && !context_.comm->sumsAtOnce() && calls.stable && !scaled_loss_ &&
                        accumulator_.calls(layer) == calls.expected;
  const std::size_t first = context_.firstFactor(layer);
  for (const std::size_t factor_index : {first, first + 1}) {
    stale_ = stale_ || prepared_[factor_index];
    if (complete) {
      prepare(factor_index, /*loss_scale=*/1);
    }
  }
  if (context_.sendsFactors() && may_leave) {
    startBuckets(/*overlapped=*/true);
  }
}

void FactorExchange::noteLossScale(double loss_scale) {
  if (loss_scale != 1) {
    stale_ = stale_ || std::any_of(prepared_.begin(), prepared_.end(), [](bool done) { return done; });
    scaled_loss_ = true;
  }
}

void FactorExchange::prepare(std::size_t factor_index, double loss_scale) {
  if (prepared_[factor_index]) {
    return;
  }
  prepared_[factor_index] = true;
  const FactorLayout& place = accumulator_.layouts()[factor_index];
  if (accumulator_.calls(place.layer) == 0) {
    accumulator_.slice(payload_, place).copy_(accumulator_.slice(accumulator_.running(), place));
  } else {
    accumulator_.preview(place, context_.decay(), loss_scale, payload_);
  }
}

void FactorExchange::startBuckets(bool overlapped) {
  if (context_.comm->sumsAtOnce()) {
    return;
  }
  const auto& ends = plan_.fusion_ends;
  while (started() < ends.size()) {
    const std::size_t begin = started() == 0 ? 0 : core::index(ends[started() - 1]);
    const std::size_t end = core::index(ends[started()]);
    const auto from = prepared_.begin() + static_cast<std::ptrdiff_t>(begin);
    if (!std::all_of(from, prepared_.begin() + static_cast<std::ptrdiff_t>(end), [](bool done) { return done; })) {
      return;
    }
    sums_.push_back(startBucket(begin, end));
    ++context_.counters.runs;
    context_.counters.runs_overlapped += overlapped ? 1 : 0;
  }
}

// Of factors that are their owners' own there is nothing to wait for.
Communicator::Sum FactorExchange::startBucket(std::size_t begin, std::size_t end) {
  const FactorLayout& first = accumulator_.layouts()[begin];
  const FactorLayout& last = accumulator_.layouts()[end - 1];
  const std::int64_t elements = last.offset + last.size - first.offset;
  const at::Tensor bucket = payload_.narrow(0, first.offset, elements);
  const core::FactorPlan& factor = plan_.factors[begin];
  if (factor.exchange == core::FactorExchange::kAllReduce) {
    return context_.comm->allReduce(bucket);
  }
  if (factor.exchange != core::FactorExchange::kReduceToOwner) {
    return {};
  }
  // Where the other ranks' shares come, if this rank owns the bucket.
  const std::int64_t place = share_place_[begin];
  const std::int64_t others = context_.ranks - 1;
  const at::Tensor shares = place < 0 ? at::Tensor() : shares_.narrow(0, place * others, elements * others);
  return context_.comm->reduce(bucket, factor.owner, kfac_tags::kSums + static_cast<int>(started()), shares);
}

void FactorExchange::startRest(double loss_scale) {
  {
    const ScopedTimer timer(context_.counters.factor_seconds);
    for (std::size_t factor_index = 0; factor_index < prepared_.size(); ++factor_index) {
      prepare(factor_index, loss_scale);
    }
  }
  const ScopedTimer timer(context_.counters.exchange_wait_seconds);
  startBuckets(/*overlapped=*/false);
}

FactorExchange::Votes FactorExchange::vote(bool takes_step, const at::Tensor& beside) {
  const StepVote own = !takes_step ? kLeavesStep : stale_ ? kTakesStepAgain : kTakesStep;
  const at::Tensor all = at::empty({context_.ranks, 1 + beside.numel()}, at::kLong);
  const at::Tensor said = all.select(0, context_.rank);
  said[0].fill_(static_cast<std::int64_t>(own));
  said.narrow(0, 1, beside.numel()).copy_(beside);
  context_.comm->gather(all, kfac_tags::kStepVote);
  const at::Tensor votes_of_all = all.select(1, 0).contiguous();
  const auto* votes = votes_of_all.const_data_ptr<std::int64_t>();
  const auto* end = votes + context_.ranks;
  const auto* other = std::find_if(votes, end, [&](auto vote) { return (vote != kLeavesStep) != takes_step; });
  Votes result;
  result.differing = other == end ? -1 : static_cast<int>(other - votes);
  result.again = std::find(votes, end, kTakesStepAgain) != end;
  result.beside = all.narrow(1, 1, beside.numel());
  return result;
}

void FactorExchange::sumAtOnce() {
  if (!context_.comm->sumsAtOnce()) {
    return;
  }
  const ScopedTimer timer(context_.counters.exchange_wait_seconds);
  const auto& layouts = accumulator_.layouts();
  bool summed = false;
  std::vector<core::Span> spans;
  for (std::size_t i = 0; i < layouts.size(); ++i) {
    const core::FactorPlan& factor = plan_.factors[i];
    summed = summed || factor.exchange != core::FactorExchange::kOwnersOwn;
    if (factor.exchange == core::FactorExchange::kAllReduce ||
        (factor.exchange == core::FactorExchange::kReduceToOwner && factor.owner == context_.rank)) {
      spans.push_back({static_cast<std::size_t>(layouts[i].offset), static_cast<std::size_t>(layouts[i].size)});
    }
  }
  if (summed) {
    context_.comm->sumAtOnce(payload_, spans);
  }
}

void FactorExchange::endBuckets() {
  for (auto& sum : sums_) {
    sum.wait();
  }
  sums_.clear();
  std::fill(prepared_.begin(), prepared_.end(), false);
  stale_ = false;
}

void FactorExchange::merge(double loss_scale) {
  const ScopedTimer timer(context_.counters.factor_seconds);
  for (std::size_t layer = 0; layer < calls_.size(); ++layer) {
    const int calls = accumulator_.calls(static_cast<int>(layer));
    calls_[layer].stable = calls > 0 && calls == calls_[layer].expected;
    calls_[layer].expected = calls;
  }
  accumulator_.merge(context_.decay(), loss_scale);
  ++context_.counters.factor_updates;
}

double FactorExchange::divisor(std::size_t factor_index) const {
  return plan_.factors[factor_index].exchange == core::FactorExchange::kOwnersOwn ? 1 : context_.ranks;
}

at::Tensor FactorExchange::mean() {
  at::Tensor mean = accumulator_.running().clone();
  if (!context_.comm) {
    return mean;
  }
  context_.comm->allReduce(mean).wait();
  mean.div_(context_.ranks);
  const auto& layouts = accumulator_.layouts();
  for (std::size_t i = 0; i < layouts.size(); ++i) {
    if (plan_.factors[i].exchange == core::FactorExchange::kOwnersOwn) {
      const at::Tensor own =
          accumulator_.slice(mean, layouts[i]).copy_(accumulator_.slice(accumulator_.running(), layouts[i]));
      context_.comm->broadcast(own, plan_.factors[i].owner)->wait();
    }
  }
  return mean;
}

std::size_t FactorExchange::bytes() const {
  std::size_t bytes = 0;
  for (const at::Tensor* buffer : {&payload_, &shares_}) {
    bytes += buffer->defined() ? buffer->nbytes() : 0;
  }
  return bytes;
}

}  // namespace torchext
