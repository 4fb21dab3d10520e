#include "core/pipeline/zero_bubble_scheduler.h"

#include <algorithm>
#include <limits>

#include "core/base/check.h"

namespace torchext::core {
namespace {

constexpr double kNotYet = std::numeric_limits<double>::infinity();

}  // namespace

double ZeroBubbleScheduler::schedule(const std::vector<StageTimes>& stages, const std::vector<int>& limits) {
  const std::size_t count = stages.size();
  const std::size_t microbatches = index(microbatches_);
  stages_ = &stages;
  limits_ = &limits;
  rows_.assign(count, {});
  starts_.assign(count, kNotYet);
  arrived_inputs_.assign(count * microbatches, kNotYet);
  arrived_gradients_.assign(count * microbatches, kNotYet);
  std::fill_n(arrived_inputs_.begin(), microbatches, 0.0);
  std::fill_n(arrived_gradients_.end() - static_cast<std::ptrdiff_t>(microbatches), microbatches, 0.0);
  most_in_flight_.assign(count, 0);
  kinds_.resize(count);
  for (std::size_t j = 0; j < count; ++j) {
    kinds_[j].clear();
    choose(j);
  }
  for (std::size_t left = 3 * count * microbatches; left > 0; --left) {
    take(static_cast<std::size_t>(std::ranges::min_element(starts_) - starts_.begin()));
  }
  double end = 0;
  for (std::size_t j = 0; j < count; ++j) {
    end = std::max(end, rows_[j].free + stages[j].split_sync_seconds);
  }
  return end;
}

// The order of the comparisons is that of ties: I, F, W.
void ZeroBubbleScheduler::choose(std::size_t stage) {
  Row& row = rows_[stage];
  const std::size_t base = stage * index(microbatches_);
  double start = kNotYet;
  if (row.inputs < row.forwards) {
    start = std::max(row.free, arrived_gradients_[base + index(row.inputs)]);
    row.next = ActionKind::kBackwardInput;
  }
  if (row.forwards < microbatches_ && row.forwards - row.weights < (*limits_)[stage]) {
    const double forward = std::max(row.free, arrived_inputs_[base + index(row.forwards)]);
    if (forward < start) {
      start = forward;
      row.next = ActionKind::kForward;
    }
  }
  if (row.weights < row.inputs && row.free < start) {
    start = row.free;
    row.next = ActionKind::kBackwardWeight;
  }
  starts_[stage] = start;
}

void ZeroBubbleScheduler::take(std::size_t stage) {
  Row& row = rows_[stage];
  const StageTimes& times = (*stages_)[stage];
  const std::size_t base = stage * index(microbatches_);
  kinds_[stage].push_back(row.next);
  row.free = starts_[stage];
  if (row.next == ActionKind::kForward) {
    row.free += times.forward_seconds;
    if (stage + 1 < rows_.size()) {
      row.sent_forward = std::max(row.free, row.sent_forward) + times.transfer_seconds;
      arrived_inputs_[base + index(microbatches_ + row.forwards)] = row.sent_forward;
      choose(stage + 1);
    }
    ++row.forwards;
    most_in_flight_[stage] = std::max(most_in_flight_[stage], row.forwards - row.weights);
  } else if (row.next == ActionKind::kBackwardInput) {
    row.free += times.backward_input_seconds;
    if (stage > 0) {
      row.sent_backward = std::max(row.free, row.sent_backward) + (*stages_)[stage - 1].transfer_seconds;
      arrived_gradients_[base + index(row.inputs) - index(microbatches_)] = row.sent_backward;
      choose(stage - 1);
    }
    ++row.inputs;
  } else {
    row.free += times.backward_weight_seconds;
    ++row.weights;
  }
  choose(stage);
}

PipelineTable ZeroBubbleScheduler::table() const {
  PipelineTable table(kinds_.size());
  for (std::size_t j = 0; j < kinds_.size(); ++j) {
    int forwards = 0;
    int inputs = 0;
    int weights = 0;
    for (const ActionKind kind : kinds_[j]) {
      int& done = kind == ActionKind::kForward ? forwards : (kind == ActionKind::kBackwardInput ? inputs : weights);
      table[j].push_back({kind, static_cast<int>(j), done++});
    }
  }
  return table;
}

}  // namespace torchext::core
