#include "core/kfac/kfac_plan.h"

#include <algorithm>
#include <map>
#include <utility>

#include "core/base/check.h"
#include "core/base/enum_names.h"
#include "core/kfac/kfac_placement.h"

namespace torchext::core {
namespace {

constexpr EnumNames<KfacStrategy, 8> kStrategies{{
    {KfacStrategy::kSpd, "spd"},
    {KfacStrategy::kPad, "pad"},
    {KfacStrategy::kCommOpt, "comm-opt"},
    {KfacStrategy::kMemOpt, "mem-opt"},
    {KfacStrategy::kHybrid, "hybrid"},
    {KfacStrategy::kDp, "dp"},
    {KfacStrategy::kDkfac, "d-kfac"},
    {KfacStrategy::kAuto, "auto"},
}};

void checkInput(const KfacPlanInput& input) {
  if (input.ranks < 1) {
    throwInvalid("ranks", input.ranks, "1 or more");
  }
  if (input.steps_per_inverse < 1) {
    throwInvalid("steps_per_inverse", input.steps_per_inverse, "1 or more");
  }
  if (!(input.worker_fraction > 0 && input.worker_fraction <= 1)) {
    throwInvalid("worker_fraction", input.worker_fraction, "above 0, up to 1");
  }
  if (!input.precondition.empty() && input.precondition.size() != input.gradient_bytes.size()) {
    throwInvalid("precondition times", input.precondition.size(), concat(input.gradient_bytes.size(), ", one a layer"));
  }
  if (!input.of_rows.empty() && input.of_rows.size() != input.gradient_bytes.size()) {
    throwInvalid("layers of rows", input.of_rows.size(), concat(input.gradient_bytes.size(), ", one a layer"));
  }
  for (const auto& task : input.tasks) {
    checkIndex("layer", task.layer, static_cast<int>(input.gradient_bytes.size()));
  }
}

int rootOf(const FactorPlan& factor) { return factor.exchange == FactorExchange::kAllReduce ? -1 : factor.owner; }

// The seconds of preconditioning that all ranks do alike, and the bytes of its results.
struct SharedDirections {
  double seconds = 0;
  std::size_t bytes = 0;
};

SharedDirections sharedDirections(const KfacPlan& plan, const KfacPlanInput& input) {
  SharedDirections sums;
  for (std::size_t layer = 0; layer < input.precondition.size(); ++layer) {
    if (plan.workers[layer] == plan.ranks) {
      sums.seconds += input.precondition[layer];
      sums.bytes += input.gradient_bytes[layer];
    }
  }
  return sums;
}

// Every rank broadcasts its share, or leaves it where the others find it.
double gatherSeconds(const SharedDirections& shared, const KfacPlanInput& input) {
  if (input.costs.sharing) {
    return input.costs.sharing->seconds(shared.bytes);
  }
  return input.ranks * input.costs.broadcast.alpha + input.costs.broadcast.beta * static_cast<double>(shared.bytes);
}

// Bytes by (owner, workers).
using Routes = std::map<std::pair<int, int>, std::size_t>;

// As messages a broadcast for each; through memory all together.
double routedSeconds(const Routes& routes, const KfacCosts& costs) {
  double seconds = 0;
  std::size_t all = 0;
  for (const auto& [route, bytes] : routes) {
    all += bytes;
    seconds += costs.broadcast.seconds(bytes);
  }
  if (!costs.sharing) {
    return seconds;
  }
  return all > 0 ? costs.sharing->seconds(all) : 0;
}

// Bucket by bucket; through memory all together, those of one owner as the others'.
double factorSeconds(const KfacPlan& plan, const KfacPlanInput& input) {
  double seconds = 0;
  std::size_t all = 0;
  std::size_t next = 0;
  for (const int end : plan.fusion_ends) {
    const FactorExchange exchange = plan.factors.at(next).exchange;
    std::size_t bytes = 0;
    for (; next < index(end); ++next) {
      bytes += input.tasks[next].factor_bytes;
    }
    if (exchange != FactorExchange::kOwnersOwn) {
      all += bytes;
      seconds +=
          (exchange == FactorExchange::kAllReduce ? input.costs.all_reduce : input.costs.broadcast).seconds(bytes);
    }
  }
  if (!input.costs.sharing) {
    return seconds;
  }
  return all > 0 ? input.costs.all_reduce.seconds(all) : 0;
}

bool splittingPays(const KfacPlan& plan, const KfacPlanInput& input) {
  // Every step then waits for its slowest rank once more, which by messages made the exchange of a small model five
  // times as long as in the measurement at start (kfac_iteration.py): start-up counts so, but not the bytes.
  // Through memory the exchange takes longer, too, but the step does not: who has waited there waits less in the next
  // all-reduce of gradients.
  const double waiting = input.costs.sharing ? 1 : 5;
  const SharedDirections shared = sharedDirections(plan, input);
  const double start_up = gatherSeconds({0, 0}, input);
  return shared.seconds * (1 - 1.0 / plan.ranks) > (waiting - 1) * start_up + gatherSeconds(shared, input);
}

// A bucket's factors are inverted once all of it has come, while later ones travel: it is as long as makes its start-up
// count little, not longer.
std::size_t largestBucket(const KfacPlanInput& input) {
  constexpr double kStartUps = 16;
  const AlphaBeta& costs = input.costs.all_reduce;
  if (input.costs.sharing || !(costs.alpha > 0) || !(costs.beta > 0)) {
    return input.bucket_cap_bytes;
  }
  const double bytes = std::max(1.0, kStartUps * costs.alpha / costs.beta);
  return input.bucket_cap_bytes == 0 || bytes < static_cast<double>(input.bucket_cap_bytes)
             ? static_cast<std::size_t>(bytes)
             : input.bucket_cap_bytes;
}

// Neighbours with the same root travel together, as far as that makes no bucket too long; in the plain algorithm each
// by itself.
std::vector<int> bucketEnds(const KfacPlan& plan, const KfacPlanInput& input) {
  const bool fused = plan.strategy != KfacStrategy::kDkfac;
  const std::size_t limit = largestBucket(input);
  std::vector<int> ends;
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < input.tasks.size(); ++i) {
    const std::size_t own = input.tasks[i].factor_bytes;
    const bool too_long = limit > 0 && bytes > 0 && bytes + own > limit;
    if (i > 0 && (!fused || too_long || rootOf(plan.factors[i]) != rootOf(plan.factors[i - 1]))) {
      ends.push_back(static_cast<int>(i));
      bytes = 0;
    }
    bytes += own;
  }
  if (!input.tasks.empty()) {
    ends.push_back(static_cast<int>(input.tasks.size()));
  }
  return ends;
}

KfacPlan makePreset(KfacStrategy strategy, const KfacPlanInput& input) {
  KfacPlan plan;
  plan.strategy = strategy;
  plan.ranks = input.ranks;
  plan.factors.resize(input.tasks.size());
  plan.workers.assign(input.gradient_bytes.size(), input.ranks);
  plan.layer_owner.assign(input.gradient_bytes.size(), 0);
  if (input.ranks > 1) {
    placeFactors(plan, input);
    plan.split_directions = strategy != KfacStrategy::kDkfac && splittingPays(plan, input);
  }
  plan.fusion_ends = bucketEnds(plan, input);
  return plan;
}

}  // namespace

KfacStrategy parseKfacStrategy(const std::string& name) { return parseEnum(kStrategies, "strategy", name); }
const char* kfacStrategyName(KfacStrategy strategy) { return enumName(kStrategies, "strategy", strategy); }

double KfacCosts::inverseSeconds(const FactorTask& task) const {
  return task.diagonal ? 0.0 : static_cast<double>(task.count) * inversion.seconds(task.dim);
}

KfacPlan makeKfacPlan(KfacStrategy strategy, const KfacPlanInput& input) {
  checkInput(input);
  if (strategy != KfacStrategy::kAuto) {
    return makePreset(strategy, input);
  }
  KfacPlan best = makePreset(KfacStrategy::kSpd, input);
  double least = predictKfac(best, input).perStep(input.steps_per_inverse);
  for (const auto other : {KfacStrategy::kPad, KfacStrategy::kCommOpt, KfacStrategy::kMemOpt, KfacStrategy::kHybrid}) {
    KfacPlan plan = makePreset(other, input);
    const double seconds = predictKfac(plan, input).perStep(input.steps_per_inverse);
    if (seconds < least) {
      least = seconds;
      best = std::move(plan);
    }
  }
  return best;
}

KfacPrediction predictKfac(const KfacPlan& plan, const KfacPlanInput& input) {
  checkInput(input);
  KfacPrediction result;
  result.exchange = plan.ranks > 1 ? factorSeconds(plan, input) : 0;
  std::vector<double> load(index(plan.ranks), 0.0);
  // What travels by (owner, workers): inverses an update, gradients a step. Messages of one pair leave together.
  Routes inverses;
  Routes gradients;
  for (std::size_t i = 0; i < input.tasks.size(); ++i) {
    const FactorPlan& factor = plan.factors.at(i);
    const double seconds = input.costs.inverseSeconds(input.tasks[i]);
    if (factor.everyone_inverts) {
      std::for_each(load.begin(), load.end(), [&](double& sum) { sum += seconds; });
      continue;
    }
    load[index(factor.owner)] += seconds;
    const int workers = plan.workers[index(input.tasks[i].layer)];
    if (workers > 1) {
      inverses[{factor.owner, workers}] += input.tasks[i].inverse_bytes;
    }
  }
  for (std::size_t layer = 0; layer < input.gradient_bytes.size(); ++layer) {
    if (plan.workers[layer] < plan.ranks) {
      gradients[{plan.layer_owner[layer], plan.workers[layer]}] += input.gradient_bytes[layer];
    }
  }
  result.invert = *std::max_element(load.begin(), load.end());
  const SharedDirections shared = sharedDirections(plan, input);
  std::vector<double> directions(index(plan.ranks),
                                 plan.split_directions ? shared.seconds / plan.ranks : shared.seconds);
  for (std::size_t layer = 0; layer < input.precondition.size(); ++layer) {
    for (int rank = 0; rank < plan.ranks && plan.workers[layer] < plan.ranks; ++rank) {
      const bool works = KfacPlan::isWorker(rank, plan.layer_owner[layer], plan.workers[layer], plan.ranks);
      directions[index(rank)] += works ? input.precondition[layer] : 0;
    }
  }
  result.precondition = *std::max_element(directions.begin(), directions.end());
  result.gradients = plan.split_directions ? gatherSeconds(shared, input) : 0;
  result.distribute = routedSeconds(inverses, input.costs);
  result.gradients += routedSeconds(gradients, input.costs);
  return result;
}

}  // namespace torchext::core
