#include "core/kfac_placement.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "core/placement.h"

namespace torchext::core {
namespace {

std::vector<double> inversionCosts(const KfacPlanInput& input) {
  std::vector<double> costs;
  costs.reserve(input.tasks.size());
  for (const auto& task : input.tasks) {
    costs.push_back(input.costs.inverseSeconds(task));
  }
  return costs;
}

// SPD: inverting at all ranks where that costs no more than the broadcast it saves, else by load.
void placeSpd(KfacPlan& plan, const KfacPlanInput& input) {
  const auto costs = inversionCosts(input);
  std::vector<double> placed_costs;
  std::vector<std::size_t> placed;
  for (std::size_t i = 0; i < costs.size(); ++i) {
    plan.factors[i].everyone_inverts = costs[i] <= input.costs.broadcast.seconds(input.tasks[i].inverse_bytes);
    if (!plan.factors[i].everyone_inverts) {
      placed.push_back(i);
      placed_costs.push_back(costs[i]);
    }
  }
  const auto rank_of = balanceLoad(placed_costs, plan.ranks);
  for (std::size_t i = 0; i < placed.size(); ++i) {
    plan.factors[placed[i]].owner = rank_of[i];
  }
}

void placePad(KfacPlan& plan, const KfacPlanInput& input) {
  const auto rank_of = splitInOrder(inversionCosts(input), plan.ranks);
  struct LayerSums {
    bool one_owner = true;
    int owner = -1;
    std::size_t inverse_bytes = 0;
  };
  std::vector<LayerSums> layers(input.gradient_bytes.size());
  for (std::size_t i = 0; i < input.tasks.size(); ++i) {
    plan.factors[i] = {FactorExchange::kReduceToOwner, rank_of[i], false};
    LayerSums& sums = layers[index(input.tasks[i].layer)];
    sums.one_owner = sums.one_owner && (sums.owner < 0 || sums.owner == rank_of[i]);
    sums.owner = rank_of[i];
    sums.inverse_bytes += input.tasks[i].inverse_bytes;
  }
  for (std::size_t layer = 0; layer < layers.size(); ++layer) {
    const double inverse_step =
        input.costs.broadcast.seconds(layers[layer].inverse_bytes) / static_cast<double>(input.steps_per_inverse);
    const bool everywhere = !input.early.empty() && input.early[layer];
    if (!everywhere && layers[layer].one_owner &&
        input.costs.broadcast.seconds(input.gradient_bytes[layer]) < inverse_step) {
      plan.workers[layer] = 1;
      plan.layer_owner[layer] = layers[layer].owner;
    }
  }
}

// KAISA's placement: whole layers, by load.
void placeLayers(KfacPlan& plan, const KfacPlanInput& input, int workers, FactorExchange exchange) {
  const auto costs = inversionCosts(input);
  std::vector<double> layer_costs(input.gradient_bytes.size(), 0.0);
  for (std::size_t i = 0; i < costs.size(); ++i) {
    layer_costs[index(input.tasks[i].layer)] += costs[i];
  }
  plan.layer_owner = balanceLoad(layer_costs, plan.ranks);
  std::fill(plan.workers.begin(), plan.workers.end(), workers);
  for (std::size_t i = 0; i < input.tasks.size(); ++i) {
    plan.factors[i] = {exchange, plan.layer_owner[index(input.tasks[i].layer)], false};
  }
}

}  // namespace

void placeFactors(KfacPlan& plan, const KfacPlanInput& input) {
  switch (plan.strategy) {
    case KfacStrategy::kSpd:
      return placeSpd(plan, input);
    case KfacStrategy::kPad:
      return placePad(plan, input);
    case KfacStrategy::kCommOpt:
      return placeLayers(plan, input, plan.ranks, FactorExchange::kAllReduce);
    case KfacStrategy::kMemOpt:
      return placeLayers(plan, input, 1, FactorExchange::kAllReduce);
    case KfacStrategy::kHybrid: {
      const auto workers = static_cast<int>(std::lround(input.worker_fraction * plan.ranks));
      return placeLayers(plan, input, std::max(1, workers), FactorExchange::kAllReduce);
    }
    case KfacStrategy::kDp:
      return placeLayers(plan, input, 1, FactorExchange::kOwnersOwn);
    case KfacStrategy::kDkfac:
    case KfacStrategy::kAuto:
      return;  // the defaults: all-reduced, inverted and used everywhere
  }
}

}  // namespace torchext::core
