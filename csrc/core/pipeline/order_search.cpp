#include "core/pipeline/order_search.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "core/base/check.h"
#include "core/pipeline/pipeline_orders.h"

namespace torchext::core {
namespace {

constexpr double kEqual = 1e-9;  // relative

// visit(stage, first layer, last layer).
template <class Visit>
void forEachStage(const StageSizes& sizes, Visit visit) {
  int first = 0;
  for (int stage = 0; stage < static_cast<int>(sizes.size()); ++stage) {
    visit(stage, first, first + sizes[index(stage)] - 1);
    first += sizes[index(stage)];
  }
}

}  // namespace

bool isBetter(const StageOrder& order, const StageOrder& other) {
  const double margin = kEqual * other.ranked_seconds;
  if (std::abs(order.ranked_seconds - other.ranked_seconds) > margin) {
    return order.ranked_seconds < other.ranked_seconds;
  }
  if (order.peak_bytes != other.peak_bytes) {
    return order.peak_bytes < other.peak_bytes;
  }
  const int in_flight = std::accumulate(order.depths.begin(), order.depths.end(), 0);
  const int other_in_flight = std::accumulate(other.depths.begin(), other.depths.end(), 0);
  return in_flight != other_in_flight ? in_flight < other_in_flight : order.sizes < other.sizes;
}

OrderSearch::OrderSearch(const StageCosts& costs, const PipelineOptions& options, OrderFamily family, int microbatches)
    : costs_(costs),
      options_(options),
      family_(family),
      microbatches_(microbatches),
      depths_(microbatches),
      zero_bubbles_(microbatches, options.overhead_seconds) {}

std::optional<StageOrder> OrderSearch::best(const StageSizes& sizes, double memory_bytes, double below) {
  return search(sizes, memory_bytes, below, true);
}

std::optional<StageOrder> OrderSearch::near(const StageSizes& sizes, double memory_bytes, double below) {
  return search(sizes, memory_bytes, below, false);
}

// Stages that do not fit otherwise recompute from the start; then those that memory limits, while it helps.
std::optional<StageOrder> OrderSearch::search(const StageSizes& sizes, double memory_bytes, double below,
                                              bool thorough) {
  StageOrder order;
  order.sizes = sizes;
  order.recompute.assign(sizes.size(), false);
  const bool may_recompute = options_.recompute && family_ != OrderFamily::kZeroBubble;
  const int least_depth = family_ == OrderFamily::kGPipe ? microbatches_ : 1;
  const std::vector<int> plain_limits = limits(order, memory_bytes);
  for (std::size_t j = 0; j < sizes.size(); ++j) {
    order.recompute[j] = may_recompute && plain_limits[j] < least_depth;
  }
  std::optional<StageOrder> best = searchWith(order, memory_bytes, below, thorough);
  if (!may_recompute) {
    return best;
  }
  for (std::size_t j = 0; j < sizes.size(); ++j) {
    StageOrder more = best ? *best : order;
    const bool limited = plain_limits[j] < microbatches_ && (!best || best->depths[j] >= plain_limits[j]);
    if (limited && !more.recompute[j]) {
      more.recompute[j] = true;
      auto found = searchWith(std::move(more), memory_bytes, best ? best->ranked_seconds : below, thorough);
      if (found && (!best || isBetter(*found, *best))) {
        best = std::move(found);
      }
    }
  }
  return best;
}

std::optional<StageOrder> OrderSearch::searchWith(StageOrder order, double memory_bytes, double below, bool thorough) {
  const std::vector<int> allowed = limits(order, memory_bytes);
  if (std::ranges::min(allowed) < 1) {
    return std::nullopt;
  }
  const std::vector<StageTimes> stages = times(order.sizes, order.recompute);
  const double bound = below * (1 + kEqual);
  if (leastSeconds(stages, microbatches_, family_ == OrderFamily::kZeroBubble) > bound) {
    return std::nullopt;
  }
  const bool split = family_ == OrderFamily::kZeroBubble;
  if (!(split ? findSplit(order, stages, allowed, thorough) : findDepths(order, stages, allowed, below, thorough)) ||
      order.ranked_seconds > bound) {
    return std::nullopt;
  }
  order.peak_bytes = peakBytes(order);
  return order;
}

bool OrderSearch::findDepths(StageOrder& order, const std::vector<StageTimes>& times, const std::vector<int>& limits,
                             double below, bool thorough) {
  DepthChoice choice;
  if (family_ == OrderFamily::kGPipe) {
    if (std::ranges::min(limits) < microbatches_) {
      return false;
    }
    choice.depths = limits;
    choice.seconds = depths_.seconds(times, limits);
  } else {
    choice = thorough ? depths_.best(times, limits) : depths_.near(times, limits, below);
  }
  order.seconds = choice.seconds;
  order.ranked_seconds = choice.seconds;
  order.depths = std::move(choice.depths);
  return !order.depths.empty();
}

bool OrderSearch::findSplit(StageOrder& order, const std::vector<StageTimes>& times, const std::vector<int>& limits,
                            bool thorough) {
  ZeroBubbleChoice choice = thorough ? zero_bubbles_.best(times, limits) : zero_bubbles_.near(times, limits);
  order.seconds = choice.seconds;
  order.ranked_seconds = choice.ranked_seconds;
  order.depths = std::move(choice.depths);
  order.limits = std::move(choice.limits);
  return true;
}

std::vector<StageTimes> OrderSearch::times(const StageSizes& sizes, const std::vector<bool>& recompute) const {
  std::vector<StageTimes> times;
  times.reserve(sizes.size());
  forEachStage(sizes, [&](int stage, int first, int last) {
    times.push_back(costs_.times(first, last, recompute[index(stage)]));
  });
  return times;
}

std::vector<int> OrderSearch::limits(const StageOrder& order, double memory_bytes) const {
  std::vector<int> limits;
  forEachStage(order.sizes, [&](int stage, int first, int last) {
    const auto& caps = options_.most_in_flight;
    const int most = caps.empty() ? microbatches_ : std::min(microbatches_, caps[index(stage)]);
    limits.push_back(costs_.depthLimit(first, last, order.recompute[index(stage)], memory_bytes, most));
  });
  return limits;
}

double OrderSearch::peakBytes(const StageOrder& order) const {
  double peak = 0;
  forEachStage(order.sizes, [&](int stage, int first, int last) {
    peak = std::max(peak, costs_.peakBytes(first, last, order.recompute[index(stage)], order.depths[index(stage)]));
  });
  return peak;
}

PipelineTable OrderSearch::table(const StageOrder& order) {
  if (family_ != OrderFamily::kZeroBubble) {
    return depthTable(order.depths, microbatches_);
  }
  return zero_bubbles_.table(times(order.sizes, order.recompute), order.limits);
}

}  // namespace torchext::core
