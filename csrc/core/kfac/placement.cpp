#include "core/kfac/placement.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <limits>
#include <numeric>

#include "core/base/check.h"

namespace torchext::core {
namespace {

void checkArguments(const std::vector<double>& costs, int ranks) {
  if (ranks < 1) {
    throwInvalid("ranks", ranks, "1 or more");
  }
  for (const double cost : costs) {
    if (!std::isfinite(cost) || cost < 0) {
      throwInvalid("cost", cost, "finite, 0 or more");
    }
  }
}

// The places of values, sorted by them; of equal ones the first comes first.
template <class Order>
std::vector<std::size_t> ranked(const std::vector<double>& values, Order order) {
  std::vector<std::size_t> places(values.size());
  std::iota(places.begin(), places.end(), std::size_t{0});
  std::stable_sort(places.begin(), places.end(),
                   [&](std::size_t a, std::size_t b) { return order(values[a], values[b]); });
  return places;
}

}  // namespace

std::vector<int> balanceLoad(const std::vector<double>& costs, int ranks) {
  checkArguments(costs, ranks);
  std::vector<double> load(index(ranks), 0.0);
  std::vector<int> rank_of(costs.size(), 0);
  for (const std::size_t task : ranked(costs, std::greater<>())) {
    const auto least = std::min_element(load.begin(), load.end());
    *least += costs[task];
    rank_of[task] = static_cast<int>(least - load.begin());
  }
  return rank_of;
}

std::vector<int> splitInOrder(const std::vector<double>& costs, int ranks) {
  checkArguments(costs, ranks);
  const std::size_t n = costs.size();
  std::vector<double> before(n + 1, 0.0);  // sum of the first i costs
  std::partial_sum(costs.begin(), costs.end(), before.begin() + 1);
  // best[e]: the first e tasks on as many ranks as rounds were made; start[r][e]: where the block of rank r begins.
  std::vector<double> best = before;
  std::vector<std::vector<std::size_t>> start(index(ranks), std::vector<std::size_t>(n + 1, 0));
  for (std::size_t rank = 1; rank < index(ranks); ++rank) {
    std::vector<double> next(n + 1, std::numeric_limits<double>::infinity());
    for (std::size_t end = 0; end <= n; ++end) {
      for (std::size_t begin = 0; begin <= end; ++begin) {
        const double largest = std::max(best[begin], before[end] - before[begin]);
        if (largest < next[end]) {
          next[end] = largest;
          start[rank][end] = begin;
        }
      }
    }
    best = std::move(next);
  }
  std::vector<int> rank_of(n, 0);
  std::size_t end = n;
  for (std::size_t rank = index(ranks); rank-- > 0;) {
    const std::size_t begin = start[rank][end];
    std::fill(rank_of.begin() + static_cast<std::ptrdiff_t>(begin), rank_of.begin() + static_cast<std::ptrdiff_t>(end),
              static_cast<int>(rank));
    end = begin;
  }
  return rank_of;
}

std::vector<int> splitInRounds(const std::vector<double>& costs, int ranks, int rounds) {
  checkArguments(costs, ranks);
  if (rounds < 1) {
    throwInvalid("rounds", rounds, "1 or more");
  }
  const auto round_of = splitInOrder(costs, rounds);
  std::vector<double> load(index(ranks), 0.0);
  std::vector<int> rank_of;
  rank_of.reserve(costs.size());
  while (rank_of.size() < costs.size()) {
    const auto first = costs.begin() + static_cast<std::ptrdiff_t>(rank_of.size());
    const auto tasks = std::count(round_of.begin(), round_of.end(), round_of[rank_of.size()]);
    const std::vector<double> part(first, first + tasks);
    const auto block_of = splitInOrder(part, ranks);
    std::vector<double> sums(index(ranks), 0.0);  // [block]
    for (std::size_t task = 0; task < part.size(); ++task) {
      sums[index(block_of[task])] += part[task];
    }
    const auto blocks = ranked(sums, std::greater<>());
    const auto receivers = ranked(load, std::less<>());
    std::vector<int> rank_of_block(index(ranks), 0);
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      rank_of_block[blocks[i]] = static_cast<int>(receivers[i]);
      load[receivers[i]] += sums[blocks[i]];
    }
    std::transform(block_of.begin(), block_of.end(), std::back_inserter(rank_of),
                   [&](int block) { return rank_of_block[index(block)]; });
  }
  return rank_of;
}

double largestLoad(const std::vector<double>& costs, const std::vector<int>& rank_of, int ranks) {
  checkArguments(costs, ranks);
  std::vector<double> load(index(ranks), 0.0);
  for (std::size_t task = 0; task < costs.size(); ++task) {
    checkIndex("rank", rank_of.at(task), ranks);
    load[index(rank_of[task])] += costs[task];
  }
  return *std::max_element(load.begin(), load.end());
}

}  // namespace torchext::core
