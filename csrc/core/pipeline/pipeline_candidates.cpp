#include "core/pipeline/pipeline_candidates.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>

#include "core/base/check.h"

namespace torchext::core {
namespace {

void checkCounts(const PipelineOptions& options) {
  if (options.world_size < 1) {
    throwInvalid("world_size", options.world_size, "1 or more");
  }
  if (options.microbatches < 1) {
    throwInvalid("microbatches", options.microbatches, "1 or more");
  }
  if (options.stages && (*options.stages < 1 || options.world_size % *options.stages != 0)) {
    throwInvalid("stages", *options.stages, concat("divisors of world_size, ", options.world_size));
  }
  if (options.frontier_points < 0) {
    throwInvalid("frontier_points", options.frontier_points, "0 or more");
  }
  if (!(options.most_partitions >= 0)) {
    throwInvalid("most_partitions", options.most_partitions, "0 or more");
  }
}

void checkCaps(const PipelineOptions& options) {
  const auto caps = static_cast<int>(options.most_in_flight.size());
  if (caps > 0 && caps != options.stages.value_or(-1)) {
    throwInvalid("number of limits in most_in_flight", caps, "0, or `stages`, which is given then");
  }
  for (const int cap : options.most_in_flight) {
    if (cap < 1) {
      throwInvalid("most_in_flight", cap, "1 or more");
    }
  }
}

}  // namespace

void checkOptions(const PipelineOptions& options) {
  checkCounts(options);
  checkCaps(options);
  if (options.memory_bytes && (!std::isfinite(*options.memory_bytes) || *options.memory_bytes < 0)) {
    throwInvalid("memory_bytes", *options.memory_bytes, "finite, 0 or more");
  }
  if (options.schedules.empty()) {
    throwInvalid("number of schedules", 0, "1 or more of 1f1b, gpipe and zero-bubble");
  }
  for (const OrderFamily family : options.schedules) {
    toString(family);
    if (std::ranges::count(options.schedules, family) > 1) {
      throwInvalid("schedules", toString(family), "each schedule once");
    }
  }
}

PipelineCandidates::PipelineCandidates(const std::vector<PipelineLayer>& layers, const PipelineLink& link,
                                       const PipelineOptions& options)
    : layers_(layers), link_(link), options_(options) {
  checkLayers(layers);
  checkLink(link);
  checkOptions(options);
  const StageRules rules{options.overhead_seconds, options.state_factor, options.first_input_gradient, 1};
  costs_[1] = std::make_unique<StageCosts>(layers, link, rules);
  for (int stages = 1; stages <= options.world_size; ++stages) {
    if (options.world_size % stages == 0 && stages == options.stages.value_or(stages)) {
      addShape(stages, options.world_size / stages, rules);
    }
  }
  if (searches_.empty()) {
    throw std::invalid_argument(concat(refused_.front().name, ": ", refused_.front().reason));
  }
}

void PipelineCandidates::addShape(int stages, int data, StageRules rules) {
  const std::string shape = shapeName(stages, data);
  std::string reason = whyNot(stages, data);
  if (!reason.empty()) {
    refused_.push_back({shape, std::move(reason)});
    return;
  }
  rules.data = data;
  auto& costs = costs_[data];
  costs = costs ? std::move(costs) : std::make_unique<StageCosts>(layers_, link_, rules);
  for (const OrderFamily family : options_.schedules) {
    if (family == OrderFamily::kZeroBubble && data > 1 && !options_.split_data_parallel) {
      refused_.push_back({concat(shape, ", ", toString(family)),
                          "DistributedDataParallel does not see gradients of W: data width 1 is allowed"});
    } else {
      searches_.emplace_back(*costs, options_, family, stages, data, options_.microbatches / data);
    }
  }
}

std::string PipelineCandidates::whyNot(int stages, int data) const {
  const auto layers = static_cast<int>(layers_.size());
  if (stages > layers) {
    return concat("more stages than layers: ", layers);
  }
  if (options_.microbatches % data != 0) {
    return concat("data width ", data, " does not divide microbatches = ", options_.microbatches);
  }
  if (data > 1 && !link_.all_reduce.contains(data)) {
    return concat("no all-reduce table for data width ", data);
  }
  return "";
}

std::optional<FoundOrder> PipelineCandidates::best(double memory_bytes, double below, SearchEffort effort) {
  std::optional<FoundOrder> best;
  for (FamilySearch& search : searches_) {
    auto found = search.best(memory_bytes, best ? std::min(below, best->order.ranked_seconds) : below, effort);
    if (found && (!best || isBetter(*found, best->order))) {
      best = {std::move(*found), &search};
    }
  }
  return best;
}

const FamilySearch& PipelineCandidates::leastDemanding() const {
  return *std::ranges::min_element(searches_, {},
                                   [](const FamilySearch& search) { return search.leastMemory().bytes; });
}

bool PipelineCandidates::exhaustive() const {
  return std::ranges::all_of(searches_, [](const FamilySearch& search) { return search.exhaustive(); });
}

}  // namespace torchext::core
