#include "core/pipeline/pipeline_plan.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <stdexcept>
#include <utility>

#include "core/base/check.h"
#include "core/pipeline/pipeline_candidates.h"
#include "core/pipeline/pipeline_simulator.h"
#include "core/pipeline/port_search.h"

namespace torchext::core {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr int kMostThriftSteps = 10;  // each a search for less memory

[[noreturn]] void throwTooSmall(const PipelineCandidates& candidates, double memory_bytes) {
  const FamilySearch& search = candidates.leastDemanding();
  const LeastMemory least = search.leastMemory();
  throwInvalid("memory_bytes", memory_bytes,
               concat(std::ceil(least.bytes), " or more, with ", search.shape(), ", ", toString(search.family()),
                      "; stage ", least.stage, ", layers ", least.first, "..", least.last, ", needs it"));
}

// As fast as the fastest, and with the lowest peak: a bisection, for less memory never makes a plan faster.
FoundOrder chooseOrder(PipelineCandidates& candidates, FoundOrder fastest) {
  const double slowest = fastest.order.ranked_seconds * (1 + kAsFast);
  FoundOrder chosen = std::move(fastest);
  double too_little = candidates.leastDemanding().leastMemory().bytes;
  double enough = justBelow(chosen.order.peak_bytes);
  for (int i = 0; i < kMostThriftSteps && too_little < enough; ++i) {
    const double middle = (too_little + enough) / 2;
    if (auto found = candidates.best(middle, slowest, SearchEffort::kCheck)) {
      chosen = std::move(*found);
      enough = justBelow(chosen.order.peak_bytes);
    } else {
      too_little = middle;
    }
  }
  return chosen;
}

// Improves each search's best for shared ports; the best of them.
FoundOrder chooseWithPorts(PipelineCandidates& candidates, std::vector<std::optional<StageOrder>>& bests,
                           double memory_bytes) {
  std::optional<FoundOrder> chosen;
  for (std::size_t i = 0; i < bests.size(); ++i) {
    FamilySearch& search = candidates.searches()[i];
    if (bests[i]) {
      bests[i] = PortSearch(search, memory_bytes).improved(*std::move(bests[i]));
      if (!chosen || isBetter(*bests[i], chosen->order)) {
        chosen = {*bests[i], &search};
      }
    }
  }
  return *std::move(chosen);
}

PipelineRun playPlan(const FoundOrder& found, const PipelineTable& table) {
  OrderSearch& orders = found.search->orders();
  if (found.search->costs().sharedPorts()) {
    return playAsTorch(orders, found.order);
  }
  return simulateTable(orders.times(found.order.sizes, found.order.recompute), table, PipelineMode::kIdeal);
}

std::vector<PlannedStage> plannedStages(const FoundOrder& found) {
  const StageOrder& order = found.order;
  const StageCosts& costs = found.search->costs();
  const bool split = found.search->family() == OrderFamily::kZeroBubble;
  std::vector<PlannedStage> stages;
  int first = 0;
  for (std::size_t j = 0; j < order.sizes.size(); ++j) {
    const int last = first + order.sizes[j] - 1;
    const StageSync& sync = costs.sync(first, last, split);
    stages.push_back({first, last, found.search->data(), order.depths[j], order.recompute[j], sync.bucket_ends,
                      sync.exposed_seconds, costs.peakBytes(first, last, order.recompute[j], order.depths[j])});
    first = last + 1;
  }
  return stages;
}

}  // namespace

PlannedPipeline planPipeline(const std::vector<PipelineLayer>& layers, const PipelineLink& link,
                             const PipelineOptions& options) {
  PipelineCandidates candidates(layers, link, options);
  const double memory_bytes = options.memory_bytes.value_or(kNever);
  std::vector<std::optional<StageOrder>> bests;
  std::optional<FoundOrder> fastest;
  for (FamilySearch& search : candidates.searches()) {
    bests.push_back(search.best(memory_bytes, kNever, SearchEffort::kFull));
    if (bests.back() && (!fastest || isBetter(*bests.back(), fastest->order))) {
      fastest = {*bests.back(), &search};
    }
  }
  if (!fastest) {
    throwTooSmall(candidates, memory_bytes);
  }
  const FoundOrder chosen = link.shared_ports ? chooseWithPorts(candidates, bests, memory_bytes)
                                              : chooseOrder(candidates, std::move(*fastest));
  PlannedPipeline plan;
  plan.stages = plannedStages(chosen);
  plan.microbatches = chosen.search->microbatches();
  plan.order = chosen.search->family();
  plan.table = chosen.search->orders().table(chosen.order);
  const PipelineRun run = playPlan(chosen, plan.table);
  plan.seconds = run.seconds;
  plan.bubble = run.bubble;
  plan.exhaustive = candidates.exhaustive();
  plan.alternatives = pipelineAlternatives(candidates, chosen, memory_bytes, bests);
  if (options.frontier_points > 0) {
    plan.frontier = pipelineFrontier(candidates, memory_bytes, options.frontier_points);
  }
  return plan;
}

std::vector<StageTimes> stageTimes(const std::vector<PipelineLayer>& layers, const PipelineLink& link,
                                   const PipelineOptions& options, const std::vector<int>& sizes,
                                   const std::vector<bool>& recompute) {
  checkOptions(options);
  const auto stages = static_cast<int>(sizes.size());
  if (stages < 1 || options.world_size % stages != 0) {
    throwInvalid("number of sizes", stages, concat("divisors of world_size, ", options.world_size));
  }
  if (!recompute.empty() && recompute.size() != sizes.size()) {
    throwInvalid("number of recompute flags", recompute.size(), concat("0, or that of sizes, ", stages));
  }
  const StageRules rules{options.overhead_seconds, options.state_factor, options.first_input_gradient,
                         options.world_size / stages};
  const StageCosts costs(layers, link, rules);
  std::vector<StageTimes> times;
  int first = 0;
  for (std::size_t j = 0; j < sizes.size(); ++j) {
    const int last = first + sizes[j] - 1;
    if (sizes[j] < 1 || last >= costs.layers()) {
      throwInvalid("size", sizes[j],
                   concat("1 or more, all sizes together ", costs.layers(), " layers; it is of stage ", j));
    }
    times.push_back(costs.times(first, last, !recompute.empty() && recompute[j]));
    first = last + 1;
  }
  if (first != costs.layers()) {
    throwInvalid("sum of sizes", first, concat(costs.layers(), ", the number of layers"));
  }
  return times;
}

}  // namespace torchext::core
