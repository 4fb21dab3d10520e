#include "core/pipeline/pipeline_frontier.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "core/pipeline/port_search.h"

namespace torchext::core {
namespace {

constexpr double kJustBelow = 1e-9;  // relative
constexpr double kSameTime = 1e-9;   // relative

FrontierPoint pointOf(const FoundOrder& found) {
  const StageOrder& order = found.order;
  return {order.peak_bytes,       order.seconds,        order.sizes,    order.depths,
          found.search->family(), found.search->data(), order.recompute};
}

}  // namespace

double justBelow(double peak_bytes) { return peak_bytes * (1 - kJustBelow) - kJustBelow; }

std::vector<FrontierPoint> pipelineFrontier(PipelineCandidates& candidates, double memory_bytes, int most_points) {
  const double least = candidates.leastDemanding().leastMemory().bytes;
  std::vector<FrontierPoint> points;
  double ratio = 1;
  for (int i = 0; i < most_points; ++i) {
    auto found = candidates.best(memory_bytes, std::numeric_limits<double>::infinity(),
                                 i == 0 ? SearchEffort::kFull : SearchEffort::kWarm);
    if (!found) {
      break;
    }
    if (found->search->costs().sharedPorts()) {
      found->order = PortSearch(*found->search, memory_bytes, 1.0 / most_points).improved(std::move(found->order));
    }
    const FrontierPoint point = pointOf(*found);
    if (i == 0 && point.memory_bytes > 0 && most_points > 1) {
      ratio = std::pow(std::max(least, 1.0) / point.memory_bytes, 1.0 / (most_points - 1));
    }
    // Less memory in no more time: a local search may miss under a high limit what it finds under a lower one.
    while (!points.empty() && points.back().seconds >= point.seconds * (1 - kSameTime)) {
      points.pop_back();
    }
    points.push_back(point);
    memory_bytes = std::min(justBelow(point.memory_bytes), std::max(least, point.memory_bytes * ratio));
  }
  std::ranges::reverse(points);
  return points;
}

}  // namespace torchext::core
