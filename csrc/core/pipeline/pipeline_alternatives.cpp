#include "core/pipeline/pipeline_alternatives.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "core/base/check.h"
#include "core/pipeline/depth_simulator.h"
#include "core/pipeline/pipeline_orders.h"
#include "core/pipeline/pipeline_simulator.h"
#include "core/pipeline/port_search.h"

namespace torchext::core {
namespace {

constexpr double kInfeasible = std::numeric_limits<double>::infinity();

PipelineAlternative alternativeOf(std::string name, double seconds, std::string reason) {
  return {std::move(name), seconds, std::move(reason)};
}

std::string whyLost(double seconds, double plan_seconds) {
  const double percent = std::round((seconds / plan_seconds - 1) * 1000) / 10;
  return percent <= 100 * kAsFast ? "as fast within 1 %, and needs more memory" : concat(percent, " % slower");
}

// With shared ports as the class runs it.
double evenSeconds(FamilySearch& search, const StageSizes& sizes, const std::vector<int>& depths) {
  const std::vector<bool> recompute(sizes.size(), false);
  const std::vector<StageTimes> stages = search.orders().times(sizes, recompute);
  if (search.costs().sharedPorts()) {
    return simulateTable(stages, depthTable(depths, search.microbatches()), PipelineMode::kClass).seconds;
  }
  return DepthSimulator(search.microbatches()).seconds(stages, depths);
}

// torch's own: an even split in the order of Schedule1F1B.
PipelineAlternative evenAlternative(FamilySearch& search, double memory_bytes, double plan_seconds) {
  const std::string name = concat(search.shape(), ", even 1f1b");
  const std::vector<double> shares(index(search.stages()), 1.0);
  const StageSizes sizes = sharedPartition(std::vector<double>(index(search.costs().layers()), 1.0), shares);
  const std::vector<int> depths = classDepths(search.stages(), search.microbatches());
  int first = 0;
  for (std::size_t j = 0; j < sizes.size(); ++j) {
    const int last = first + sizes[j] - 1;
    const double peak = search.costs().peakBytes(first, last, false, depths[j]);
    if (peak > memory_bytes) {
      return alternativeOf(name, kInfeasible, concat("stage ", j, " needs ", std::ceil(peak), " bytes"));
    }
    first = last + 1;
  }
  const double seconds = evenSeconds(search, sizes, depths);
  return alternativeOf(name, seconds, whyLost(seconds, plan_seconds));
}

}  // namespace

std::vector<PipelineAlternative> pipelineAlternatives(PipelineCandidates& candidates, const FoundOrder& chosen,
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
          name, kInfeasible,
          concat("needs ", std::ceil(search.leastMemory().bytes), " bytes on stage ", search.leastMemory().stage)));
    }
    if (search.stages() != even_of) {
      all.push_back(evenAlternative(search, memory_bytes, plan_seconds));
      even_of = search.stages();
    }
  }
  for (const RefusedShape& refused : candidates.refused()) {
    all.push_back(alternativeOf(refused.name, kInfeasible, refused.reason));
  }
  std::ranges::stable_sort(all, {}, &PipelineAlternative::seconds);
  return all;
}

}  // namespace torchext::core
