#include "core/kfac/kfac_placement.h"

#include <algorithm>
#include <cmath>

#include "core/base/check.h"
#include "core/kfac/placement.h"

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

// Over links the owner of the last layers to come would get all of them over its own link, while the others' are idle,
// and then send all that it makes of them: so whole layers go to owners in several rounds, as many as leave blocks that
// are worth a message's start-up and loads about as even as those of single factors in one. Also where that is one:
// an owner of both factors of a layer needs nobody else's trace to invert them.
std::vector<int> ownersInOrder(const KfacPlan& plan, const KfacPlanInput& input) {
  constexpr double kStartUps = 16;
  constexpr double kLoad = 1.1;
  const auto costs = inversionCosts(input);
  auto rank_of = splitInOrder(costs, plan.ranks);
  const AlphaBeta& link = input.costs.broadcast;
  if (input.costs.sharing || !(link.alpha > 0) || !(link.beta > 0)) {
    return rank_of;
  }
  const double limit = kLoad * largestLoad(costs, rank_of, plan.ranks);
  std::vector<double> layer_costs;  // in the order of tasks, where those of a layer are neighbours
  std::vector<std::size_t> place(costs.size());
  double bytes = 0;
  for (std::size_t i = 0; i < costs.size(); ++i) {
    if (i == 0 || input.tasks[i].layer != input.tasks[i - 1].layer) {
      layer_costs.push_back(0);
    }
    layer_costs.back() += costs[i];
    place[i] = layer_costs.size() - 1;
    bytes += static_cast<double>(input.tasks[i].factor_bytes);
  }
  const double worth_it = bytes / plan.ranks / (kStartUps * link.alpha / link.beta);
  const std::size_t most = layer_costs.size() / index(plan.ranks);
  const int as_many = static_cast<int>(std::min(worth_it, static_cast<double>(most)));
  for (int rounds = std::max(1, as_many); rounds >= 1; --rounds) {
    const auto rank_of_layer = splitInRounds(layer_costs, plan.ranks, rounds);
    if (largestLoad(layer_costs, rank_of_layer, plan.ranks) <= limit) {
      std::transform(place.begin(), place.end(), rank_of.begin(), [&](std::size_t i) { return rank_of_layer[i]; });
      break;
    }
  }
  return rank_of;
}

// Of a layer's factors.
struct LayerSums {
  bool one_owner = true;
  int owner = -1;
  std::size_t inverse_bytes = 0;
};

// What a step would save on the links if the owner of both factors alone preconditioned.
double savedByOwner(const LayerSums& sums, std::size_t gradient_bytes, const KfacPlanInput& input) {
  const AlphaBeta& link = input.costs.broadcast;
  return sums.one_owner ? link.seconds(sums.inverse_bytes) / static_cast<double>(input.steps_per_inverse) -
                              link.seconds(gradient_bytes)
                        : 0;
}

// Whether all ranks precondition every layer that may be of rows: where that takes little beside what rows would save
// of their directions.
bool rowsAreWorthInverses(const std::vector<LayerSums>& layers, const KfacPlanInput& input) {
  constexpr double kShare = 0.2;
  double taken = 0;
  double directions = 0;
  for (std::size_t layer = 0; layer < input.of_rows.size() && !input.precondition.empty(); ++layer) {
    if (input.of_rows[layer]) {
      taken += std::max(0.0, savedByOwner(layers[layer], input.gradient_bytes[layer], input));
      directions += input.precondition[layer];
    }
  }
  return taken < kShare * directions;
}

void placePad(KfacPlan& plan, const KfacPlanInput& input) {
  const auto rank_of = ownersInOrder(plan, input);
  std::vector<LayerSums> layers(input.gradient_bytes.size());
  for (std::size_t i = 0; i < input.tasks.size(); ++i) {
    plan.factors[i] = {FactorExchange::kReduceToOwner, rank_of[i], false};
    LayerSums& sums = layers[index(input.tasks[i].layer)];
    sums.one_owner = sums.one_owner && (sums.owner < 0 || sums.owner == rank_of[i]);
    sums.owner = rank_of[i];
    sums.inverse_bytes += input.tasks[i].inverse_bytes;
  }
  const bool rows_everywhere = rowsAreWorthInverses(layers, input);
  for (std::size_t layer = 0; layer < layers.size(); ++layer) {
    const bool everywhere = rows_everywhere && input.of_rows[layer];
    if (!everywhere && savedByOwner(layers[layer], input.gradient_bytes[layer], input) > 0) {
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

// An owner of DP-KFAC inverts what its own batches made, so that another owner means another result. Owners therefore
// depend on sizes alone: timings differ from run to run.
KfacPlanInput byNominalCosts(KfacPlanInput input) {
  input.costs.inversion = {.fixed = 1e5, .cubic = 1};  // measured on CPUs: 2e4 to 7e5 times the cubic part
  return input;
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
      return placeLayers(plan, byNominalCosts(input), 1, FactorExchange::kOwnersOwn);
    case KfacStrategy::kDkfac:
    case KfacStrategy::kAuto:
      return;  // the defaults: all-reduced, inverted and used everywhere
  }
}

}  // namespace torchext::core
