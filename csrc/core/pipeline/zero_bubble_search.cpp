#include "core/pipeline/zero_bubble_search.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "core/base/check.h"
#include "core/pipeline/pipeline_orders.h"
#include "core/pipeline/pipeline_simulator.h"

namespace torchext::core {
namespace {

constexpr double kSameOrder = 1e-9;  // relative
constexpr double kFragile = 0.05;    // of transfers and overheads

// Times on a bad day.
std::vector<StageTimes> stressed(std::vector<StageTimes> times, double overhead_seconds) {
  const double more = kFragile * overhead_seconds;
  for (StageTimes& stage : times) {
    stage.transfer_seconds *= 1 + kFragile;
    stage.forward_seconds += more;
    stage.backward_input_seconds += stage.backward_input_seconds > 0 ? more : 0;
    stage.backward_weight_seconds += more;
  }
  return times;
}

std::vector<int> capped(std::vector<int> limits, int cap) {
  for (int& limit : limits) {
    limit = std::min(limit, cap);
  }
  return limits;
}

}  // namespace

ZeroBubbleChoice ZeroBubbleSearch::best(const std::vector<StageTimes>& stages, const std::vector<int>& limits) {
  const auto count = static_cast<int>(stages.size());
  std::vector<std::vector<int>> tried;
  ZeroBubbleChoice best;
  for (const int cap : {microbatches_, 2 * count - 1, count}) {
    std::vector<int> allowed = capped(limits, cap);
    if (std::ranges::find(tried, allowed) == tried.end()) {
      tried.push_back(allowed);
      ZeroBubbleChoice choice = scheduled(stages, std::move(allowed));
      // Of equals the one with less in flight.
      if (best.depths.empty() || choice.ranked_seconds <= best.ranked_seconds * (1 + kSameOrder)) {
        best = std::move(choice);
        last_cap_ = cap;
      }
    }
  }
  ZeroBubbleChoice torchs = ofTorch(stages);
  const bool fits = std::ranges::equal(torchs.depths, limits, std::ranges::less_equal());
  return fits && torchs.ranked_seconds < best.ranked_seconds * (1 - kSameOrder) ? torchs : best;
}

ZeroBubbleChoice ZeroBubbleSearch::near(const std::vector<StageTimes>& stages, const std::vector<int>& limits) {
  return last_cap_ == 0 ? best(stages, limits) : scheduled(stages, capped(limits, last_cap_));
}

ZeroBubbleChoice ZeroBubbleSearch::scheduled(const std::vector<StageTimes>& stages, std::vector<int> limits) {
  ZeroBubbleChoice choice;
  choice.seconds = scheduler_.schedule(stages, limits);
  choice.depths = scheduler_.mostInFlight();
  choice.limits = std::move(limits);
  const bool tight = std::ranges::max(choice.depths) <= static_cast<int>(stages.size());
  choice.ranked_seconds = tight ? rankedSeconds(stages, scheduler_.table()) : choice.seconds;
  return choice;
}

ZeroBubbleChoice ZeroBubbleSearch::ofTorch(const std::vector<StageTimes>& stages) const {
  const PipelineTable table = zeroBubbleClassTable(static_cast<int>(stages.size()), microbatches_);
  return {mostInFlight(table),
          {},
          simulateTable(stages, table, PipelineMode::kIdeal).seconds,
          rankedSeconds(stages, table)};
}

double ZeroBubbleSearch::rankedSeconds(const std::vector<StageTimes>& stages, const PipelineTable& table) const {
  return simulateTable(stressed(stages, overhead_seconds_), table, PipelineMode::kIdeal).seconds;
}

PipelineTable ZeroBubbleSearch::table(const std::vector<StageTimes>& stages, const std::vector<int>& limits) {
  if (limits.empty()) {
    return zeroBubbleClassTable(static_cast<int>(stages.size()), microbatches_);
  }
  scheduler_.schedule(stages, limits);
  return scheduler_.table();
}

}  // namespace torchext::core
