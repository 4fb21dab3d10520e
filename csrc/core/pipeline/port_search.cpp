#include "core/pipeline/port_search.h"

#include <algorithm>
#include <array>
#include <functional>
#include <utility>

#include "core/base/check.h"
#include "core/pipeline/pipeline_orders.h"

namespace torchext::core {
namespace {

constexpr double kSameSeconds = 1e-9;  // relative
constexpr std::array<int, 4> kPortDepthSteps{1, -1, 2, -2};
// Of one search, in micro-batches times stages squared: an event looks at every link.
constexpr double kMostWork = 8e6;
constexpr double kFewestOrders = 8;

}  // namespace

PipelineRun playAsTorch(OrderSearch& orders, const StageOrder& order) {
  const PipelineTable table = orders.table(order);
  const auto stages = static_cast<int>(table.size());
  const bool of_class = table == gpipeTable(stages, checkTable(table));  // ScheduleGPipe runs it
  return simulateTable(orders.times(order.sizes, order.recompute), table,
                       of_class ? PipelineMode::kClass : PipelineMode::kTorch);
}

PortSearch::PortSearch(FamilySearch& search, double memory_bytes, double share)
    : search_(search),
      memory_bytes_(memory_bytes),
      left_(std::max(kFewestOrders, share * kMostWork / search.microbatches() / search.stages() / search.stages())) {}

StageOrder PortSearch::improved(StageOrder order) {
  now_ = std::move(order);
  play(now_);
  while (left_ > 0 && (moveLayer() || moveDepth())) {
  }
  shrink();
  return std::move(now_);
}

bool PortSearch::play(StageOrder& order) {
  OrderSearch& orders = search_.orders();
  const std::vector<int> limits = orders.limits(order, memory_bytes_);
  const bool split = search_.family() == OrderFamily::kZeroBubble;
  if (!split && (!std::ranges::is_sorted(order.depths, std::ranges::greater()) || order.depths.back() < 1 ||
                 order.depths.front() > search_.microbatches())) {
    return false;
  }
  const PipelineRun run = playAsTorch(orders, order);
  order.depths = run.most_in_flight;
  order.seconds = run.seconds;
  order.ranked_seconds = run.seconds;
  order.peak_bytes = orders.peakBytes(order);
  return std::ranges::equal(order.depths, limits, std::ranges::less_equal());
}

bool PortSearch::offer(StageOrder order) {
  if (left_ <= 0) {
    return false;
  }
  --left_;
  if (!play(order) || order.seconds >= now_.seconds * (1 - kSameSeconds)) {
    return false;
  }
  now_ = std::move(order);
  return true;
}

bool PortSearch::moveLayer() {
  bool faster = false;
  const std::size_t stages = now_.sizes.size();
  for (std::size_t from = 0; from < stages; ++from) {
    for (std::size_t to = 0; to < stages; ++to) {
      if (to != from && now_.sizes[from] > 1) {
        StageOrder moved = now_;
        --moved.sizes[from];
        ++moved.sizes[to];
        faster |= offer(std::move(moved));
      }
    }
  }
  return faster;
}

bool PortSearch::moveDepth() {
  bool faster = false;
  if (search_.family() == OrderFamily::kGPipe) {
    return faster;
  }
  for (std::size_t stage = 0; stage < depthsOf(now_).size(); ++stage) {
    for (const int step : kPortDepthSteps) {
      StageOrder moved = now_;
      int& depth = depthsOf(moved)[stage];
      depth += step;
      faster |= depth >= 1 && offer(std::move(moved));
    }
  }
  return faster;
}

bool PortSearch::lowered(std::size_t stage, double slowest) {
  StageOrder moved = now_;
  if (--depthsOf(moved)[stage] < 1 || !play(moved)) {
    return false;
  }
  const bool as_fast = moved.seconds <= now_.seconds * (1 + kSameSeconds);
  if (!as_fast && (moved.seconds > slowest || moved.peak_bytes >= now_.peak_bytes)) {
    return false;
  }
  now_ = std::move(moved);
  return true;
}

// The last stages first, for those before them hold no fewer.
void PortSearch::shrink() {
  if (search_.family() == OrderFamily::kGPipe) {
    return;
  }
  const double slowest = now_.seconds * (1 + kAsFast);
  for (std::size_t stage = depthsOf(now_).size(); stage-- > 0;) {
    while (left_ > 0 && lowered(stage, slowest)) {
      --left_;
    }
  }
}

// None of torch's own zero bubble.
std::vector<int>& PortSearch::depthsOf(StageOrder& order) const {
  return search_.family() == OrderFamily::kZeroBubble ? order.limits : order.depths;
}

}  // namespace torchext::core
