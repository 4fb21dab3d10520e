#include "core/pipeline/order_search.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "core/base/check.h"
#include "core/pipeline/pipeline_orders.h"
#include "core/pipeline/pipeline_simulator.h"

namespace torchext::core {
namespace {

constexpr double kEqual = 1e-9;    // relative
constexpr double kFragile = 0.05;  // of transfers and overheads

// visit(stage, first layer, last layer).
template <class Visit>
void forEachStage(const StageSizes& sizes, Visit visit) {
  int first = 0;
  for (int stage = 0; stage < static_cast<int>(sizes.size()); ++stage) {
    visit(stage, first, first + sizes[index(stage)] - 1);
    first += sizes[index(stage)];
  }
}

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
      scheduler_(microbatches) {}

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
  const bool found = family_ == OrderFamily::kZeroBubble ? findSplit(order, stages, allowed, thorough)
                                                         : findDepths(order, stages, allowed, below, thorough);
  if (!found || order.ranked_seconds > bound) {
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

// List scheduling with as many in flight as memory allows, with 2 p - 1 and with p; and torch's own order.
bool OrderSearch::findSplit(StageOrder& order, const std::vector<StageTimes>& times, const std::vector<int>& limits,
                            bool thorough) {
  const auto stages = static_cast<int>(times.size());
  std::vector<std::vector<int>> tried;
  order.ranked_seconds = std::numeric_limits<double>::infinity();
  const auto keep = [&](double seconds, double ranked, const std::vector<int>& depths, const std::vector<int>& used) {
    if (ranked <= order.ranked_seconds * (1 + kEqual) || order.depths.empty()) {
      order.seconds = seconds;
      order.ranked_seconds = ranked;
      order.depths = depths;
      order.limits = used;
    }
  };
  for (const int cap : {microbatches_, 2 * stages - 1, stages}) {
    std::vector<int> capped = limits;
    for (int& limit : capped) {
      limit = std::min(limit, cap);
    }
    if (std::ranges::find(tried, capped) == tried.end()) {
      const double seconds = scheduler_.schedule(times, capped);
      const int most = std::ranges::max(scheduler_.mostInFlight());
      const double ranked = most > stages ? seconds : rankedSeconds(times, scheduler_.table(), most, seconds);
      keep(seconds, ranked, scheduler_.mostInFlight(), capped);
      tried.push_back(std::move(capped));
    }
  }
  if (thorough) {
    const PipelineTable table = zeroBubbleClassTable(stages, microbatches_);
    const std::vector<int> depths = mostInFlight(table);
    if (std::ranges::equal(depths, limits, std::ranges::less_equal())) {
      const double seconds = simulateTable(times, table, PipelineMode::kIdeal).seconds;
      const double ranked = rankedSeconds(times, table, stages, seconds);
      if (ranked < order.ranked_seconds * (1 - kEqual)) {
        keep(seconds, ranked, depths, {});
      }
    }
  }
  return true;
}

double OrderSearch::rankedSeconds(const std::vector<StageTimes>& times, const PipelineTable& table, int most_in_flight,
                                  double seconds) const {
  if (most_in_flight > static_cast<int>(times.size())) {
    return seconds;
  }
  return simulateTable(stressed(times, options_.overhead_seconds), table, PipelineMode::kIdeal).seconds;
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
  if (order.limits.empty()) {
    return zeroBubbleClassTable(static_cast<int>(order.sizes.size()), microbatches_);
  }
  scheduler_.schedule(times(order.sizes, order.recompute), order.limits);
  return scheduler_.table();
}

}  // namespace torchext::core
