#include "core/pipeline/pipeline_plan.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <stdexcept>
#include <utility>

#include "core/base/check.h"
#include "core/pipeline/pipeline_candidates.h"
#include "core/pipeline/pipeline_orders.h"
#include "core/pipeline/pipeline_simulator.h"

namespace torchext::core {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr double kAsFast = 0.01;     // times are equal then, and memory decides
constexpr int kMostThriftSteps = 8;  // each a search for less memory
constexpr double kSmallestStep = 1e-9;

[[noreturn]] void throwTooSmall(const PipelineCandidates& candidates, double memory_bytes) {
  const FamilySearch& search = candidates.leastDemanding();
  const LeastMemory least = search.leastMemory();
  throwInvalid("memory_bytes", memory_bytes,
               concat(std::ceil(least.bytes), " or more, with ", search.shape(), ", ", toString(search.family()),
                      "; stage ", least.stage, ", layers ", least.first, "..", least.last, ", needs it"));
}

// The best of all, and then, while it takes as long, one with a lower peak.
FoundOrder chooseOrder(PipelineCandidates& candidates, double memory_bytes, FoundOrder fastest) {
  const double slowest = fastest.order.ranked_seconds * (1 + kAsFast);
  FoundOrder chosen = std::move(fastest);
  for (int i = 0; i < kMostThriftSteps; ++i) {
    auto found = candidates.best(std::min(memory_bytes, justBelow(chosen.order.peak_bytes)), slowest, true);
    if (!found) {
      break;
    }
    chosen = std::move(*found);
  }
  return chosen;
}

PipelineAlternative alternativeOf(std::string name, double seconds, std::string reason) {
  return {std::move(name), seconds, std::move(reason)};
}

std::string whyLost(double seconds, double plan_seconds) {
  const double percent = std::round((seconds / plan_seconds - 1) * 1000) / 10;
  return percent <= 100 * kAsFast ? "as fast within 1 %, and needs more memory" : concat(percent, " % slower");
}

// torch's own: an even split in the order of Schedule1F1B.
PipelineAlternative evenAlternative(FamilySearch& search, double memory_bytes, double plan_seconds) {
  const std::string name = concat(search.shape(), ", even 1f1b");
  const std::vector<double> shares(index(search.stages()), 1.0);
  const StageSizes sizes = sharedPartition(std::vector<double>(index(search.costs().layers()), 1.0), shares);
  const std::vector<int> depths = classDepths(search.stages(), search.microbatches());
  const std::vector<bool> recompute(sizes.size(), false);
  int first = 0;
  for (std::size_t j = 0; j < sizes.size(); ++j) {
    const int last = first + sizes[j] - 1;
    const double peak = search.costs().peakBytes(first, last, false, depths[j]);
    if (peak > memory_bytes) {
      return alternativeOf(name, kNever, concat("stage ", j, " needs ", std::ceil(peak), " bytes"));
    }
    first = last + 1;
  }
  DepthSimulator simulator(search.microbatches());
  const double seconds = simulator.seconds(search.orders().times(sizes, recompute), depths);
  return alternativeOf(name, seconds, whyLost(seconds, plan_seconds));
}

std::vector<PipelineAlternative> alternatives(PipelineCandidates& candidates, const FoundOrder& chosen,
                                              double memory_bytes,
                                              const std::vector<std::optional<StageOrder>>& bests) {
  std::vector<PipelineAlternative> all;
  const double plan_seconds = chosen.order.seconds;
  int even_of = 0;
  for (std::size_t i = 0; i < bests.size(); ++i) {
    FamilySearch& search = candidates.searches()[i];
    const std::string name = concat(search.shape(), ", ", toString(search.family()));
    if (&search == chosen.search) {
      all.push_back(alternativeOf(name, plan_seconds, "the plan"));
    } else if (bests[i]) {
      all.push_back(alternativeOf(name, bests[i]->seconds, whyLost(bests[i]->seconds, plan_seconds)));
    } else {
      all.push_back(alternativeOf(
          name, kNever,
          concat("needs ", std::ceil(search.leastMemory().bytes), " bytes on stage ", search.leastMemory().stage)));
    }
    if (search.stages() != even_of) {
      all.push_back(evenAlternative(search, memory_bytes, plan_seconds));
      even_of = search.stages();
    }
  }
  for (const RefusedShape& refused : candidates.refused()) {
    all.push_back(alternativeOf(refused.name, kNever, refused.reason));
  }
  std::ranges::stable_sort(all, {}, &PipelineAlternative::seconds);
  return all;
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
    bests.push_back(search.best(memory_bytes, kNever, false));
    if (bests.back() && (!fastest || isBetter(*bests.back(), fastest->order))) {
      fastest = {*bests.back(), &search};
    }
  }
  if (!fastest) {
    throwTooSmall(candidates, memory_bytes);
  }
  const FoundOrder chosen = chooseOrder(candidates, memory_bytes, std::move(*fastest));
  PlannedPipeline plan;
  plan.stages = plannedStages(chosen);
  plan.microbatches = chosen.search->microbatches();
  plan.order = chosen.search->family();
  plan.table = chosen.search->orders().table(chosen.order);
  const PipelineRun run = simulateTable(chosen.search->orders().times(chosen.order.sizes, chosen.order.recompute),
                                        plan.table, PipelineMode::kIdeal);
  plan.seconds = run.seconds;
  plan.bubble = run.bubble;
  plan.exhaustive = candidates.exhaustive();
  plan.alternatives = alternatives(candidates, chosen, memory_bytes, bests);
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
