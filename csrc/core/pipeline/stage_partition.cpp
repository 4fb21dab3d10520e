#include "core/pipeline/stage_partition.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "core/base/check.h"

namespace torchext::core {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();

double wholeSeconds(const StageCosts& costs, int first, int last) {
  const StageTimes times = costs.times(first, last, false);
  return times.forward_seconds + times.backward_seconds;
}

// Shares that fall by 1 - phi / M from a stage to the next.
StageSizes geometricPartition(const StageCosts& costs, int stages, int microbatches, bool split) {
  std::vector<double> seconds;
  seconds.reserve(index(costs.layers()));
  for (int layer = 0; layer < costs.layers(); ++layer) {
    seconds.push_back(wholeSeconds(costs, layer, layer));
  }
  const StageTimes all = costs.times(0, costs.layers() - 1, false);
  const double whole = all.forward_seconds + all.backward_seconds;
  const double phi = split && whole > 0 ? all.forward_seconds / whole : 1;
  std::vector<double> shares{1};
  for (int stage = 1; stage < stages; ++stage) {
    shares.push_back(shares.back() * (1 - phi / microbatches));
  }
  return sharedPartition(seconds, shares);
}

void addSeed(std::vector<StageSizes>& seeds, StageSizes seed) {
  if (std::ranges::find(seeds, seed) == seeds.end()) {
    seeds.push_back(std::move(seed));
  }
}

// By one layer from a stage to another; false: it has but one.
bool moveLayer(StageSizes& sizes, int from, int to) {
  if (from == to || sizes[index(from)] < 2) {
    return false;
  }
  --sizes[index(from)];
  ++sizes[index(to)];
  return true;
}

}  // namespace

double partitionCount(int layers, int stages) {
  double count = 1;
  for (int i = 1; i < stages; ++i) {
    count = count * (layers - i) / i;
  }
  return std::round(count);
}

void forEachPartition(int layers, int stages, const std::function<void(const StageSizes&)>& visit) {
  StageSizes sizes(index(stages), 1);
  sizes.back() = layers - stages + 1;
  while (true) {
    visit(sizes);
    // The last stage but one that can grow at the cost of those behind it, which then become least.
    int grown = stages - 2;
    int behind = sizes.back();
    while (grown >= 0 && behind == stages - 1 - grown) {
      behind += sizes[index(grown)];
      --grown;
    }
    if (grown < 0) {
      return;
    }
    ++sizes[index(grown)];
    std::fill(sizes.begin() + grown + 1, sizes.end(), 1);
    sizes.back() = behind - 1 - (stages - 2 - grown);
  }
}

StageSizes leastMaximum(int layers, int stages, const std::function<double(int, int, int)>& cost) {
  // [stage][end] the least maximum of layers 0..end-1 on stages 0..stage, and where that stage begins.
  const std::size_t width = index(layers) + 1;
  std::vector<double> least(index(stages) * width, kInfinite);
  std::vector<int> begins(index(stages) * width, 0);
  for (int end = 1; end <= layers; ++end) {
    least[index(end)] = cost(0, 0, end - 1);
  }
  for (int stage = 1; stage < stages; ++stage) {
    for (int end = stage + 1; end <= layers; ++end) {
      const std::size_t place = index(stage) * width + index(end);
      for (int begin = stage; begin < end; ++begin) {
        const double before = least[index(stage - 1) * width + index(begin)];
        if (before >= least[place]) {
          continue;
        }
        const double maximum = std::max(before, cost(stage, begin, end - 1));
        if (maximum < least[place]) {
          least[place] = maximum;
          begins[place] = begin;
        }
      }
    }
  }
  StageSizes sizes(index(stages));
  int end = layers;
  for (int stage = stages - 1; stage >= 0; --stage) {
    const int begin = begins[index(stage) * width + index(end)];
    sizes[index(stage)] = end - begin;
    end = begin;
  }
  return sizes;
}

StageSizes sharedPartition(const std::vector<double>& layer_costs, const std::vector<double>& shares) {
  const double all = std::accumulate(layer_costs.begin(), layer_costs.end(), 0.0);
  const double all_shares = std::accumulate(shares.begin(), shares.end(), 0.0);
  const auto layers = static_cast<int>(layer_costs.size());
  const auto stages = static_cast<int>(shares.size());
  StageSizes sizes;
  int end = 0;
  double cost = 0;
  double target = 0;
  for (int stage = 0; stage + 1 < stages; ++stage) {
    target += all_shares > 0 ? all * shares[index(stage)] / all_shares : 0;
    const int begin = end;
    const int last_end = layers - (stages - 1 - stage);
    do {
      cost += layer_costs[index(end++)];
    } while (end < last_end && cost + layer_costs[index(end)] / 2 <= target);
    sizes.push_back(end - begin);
  }
  sizes.push_back(layers - end);
  return sizes;
}

std::vector<StageSizes> seedPartitions(const StageCosts& costs, int stages, int microbatches, bool split) {
  const int layers = costs.layers();
  std::vector<StageSizes> seeds;
  addSeed(seeds, sharedPartition(std::vector<double>(index(layers), 1.0), std::vector<double>(index(stages), 1.0)));
  addSeed(seeds, leastMaximum(layers, stages,
                              [&](int /*stage*/, int first, int last) { return wholeSeconds(costs, first, last); }));
  addSeed(seeds, geometricPartition(costs, stages, microbatches, split));
  addSeed(seeds, leastMaximum(layers, stages, [&](int stage, int first, int last) {
            return costs.peakBytes(first, last, false, std::min(microbatches, stages - stage));
          }));
  return seeds;
}

void improvePartition(StageSizes& sizes, const std::function<bool(const StageSizes&)>& accept, int most_questions) {
  const auto stages = static_cast<int>(sizes.size());
  int questions = 0;
  const auto better = [&](int from, int to) {
    StageSizes moved = sizes;
    if (questions >= most_questions || !moveLayer(moved, from, to)) {
      return false;
    }
    ++questions;
    if (!accept(moved)) {
      return false;
    }
    sizes = std::move(moved);
    return true;
  };
  for (bool found = true; found;) {
    found = false;
    for (int distance = 1; distance < stages && !found; ++distance) {
      for (int stage = 0; stage + distance < stages; ++stage) {
        found |= better(stage, stage + distance) || better(stage + distance, stage);
      }
    }
  }
}

}  // namespace torchext::core
