#include "core/transport/rack_map.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <utility>

#include "core/base/check.h"

namespace torchext::core {
namespace {

// Numbers by the order of their first appearance.
template <class Key>
std::vector<int> dense(const std::vector<Key>& keys) {
  std::map<Key, int> number;
  std::vector<int> result;
  result.reserve(keys.size());
  for (const Key& key : keys) {
    result.push_back(number.emplace(key, static_cast<int>(number.size())).first->second);
  }
  return result;
}

void checkMatrix(const std::vector<std::vector<double>>& bandwidth) {
  for (const auto& row : bandwidth) {
    if (row.size() != bandwidth.size()) {
      throwInvalid("size of a row of bandwidth", row.size(), concat(bandwidth.size(), " (square)"));
    }
  }
  for (std::size_t a = 0; a < bandwidth.size(); ++a) {
    for (std::size_t b = 0; b < bandwidth.size(); ++b) {
      if (a != b && !(std::isfinite(bandwidth[a][b]) && bandwidth[a][b] > 0 && bandwidth[a][b] == bandwidth[b][a])) {
        throwInvalid("bandwidth", bandwidth[a][b],
                     concat("more than 0, finite, the same both ways; it is that of hosts ", a, " and ", b));
      }
    }
  }
}

double bestOf(const std::vector<double>& row, std::size_t self) {
  double best = 0.0;
  for (std::size_t other = 0; other < row.size(); ++other) {
    best = other == self ? best : std::max(best, row[other]);
  }
  return best;
}

}  // namespace

RackMap rackMapOf(const std::vector<int>& host_of, const std::vector<std::int64_t>& racks) {
  if (racks.empty() || racks.size() != host_of.size()) {
    throwInvalid("size of racks", racks.size(), concat("the number of ranks = ", host_of.size()));
  }
  std::vector<std::pair<int, std::int64_t>> places;
  places.reserve(racks.size());
  for (std::size_t rank = 0; rank < racks.size(); ++rank) {
    places.emplace_back(host_of[rank], racks[rank]);
  }
  const std::vector<int> rack_of_rank = dense(racks);
  RackMap map{.host_of = dense(places)};
  map.rack_of.resize(index(*std::max_element(map.host_of.begin(), map.host_of.end())) + 1);
  for (std::size_t rank = 0; rank < racks.size(); ++rank) {
    map.rack_of[index(map.host_of[rank])] = rack_of_rank[rank];
  }
  map.uplink_bandwidth.assign(index(*std::max_element(rack_of_rank.begin(), rack_of_rank.end())) + 1, 1.0);
  return map;
}

std::vector<int> RackMap::rackOfRanks() const {
  std::vector<int> ranks;
  ranks.reserve(host_of.size());
  for (const int host : host_of) {
    ranks.push_back(rack_of[index(host)]);
  }
  return ranks;
}

std::vector<int> findRacks(const std::vector<std::vector<double>>& bandwidth) {
  checkMatrix(bandwidth);
  std::vector<std::size_t> order(bandwidth.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  // The fast ones first: a slow host reaches nobody at more than its own speed, and would hide where the racks end.
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return bestOf(bandwidth[a], a) > bestOf(bandwidth[b], b); });
  std::vector<std::vector<std::size_t>> racks;
  std::vector<int> rack_of(bandwidth.size());
  for (const std::size_t host : order) {
    double most = 0.0;
    std::size_t nearest = racks.size();
    for (std::size_t rack = 0; rack < racks.size(); ++rack) {
      double sum = 0.0;
      for (const std::size_t other : racks[rack]) {
        sum += bandwidth[host][other];
      }
      const double mean = sum / static_cast<double>(racks[rack].size());
      if (mean > most) {
        most = mean;
        nearest = rack;
      }
    }
    if (most < kSameRack * bestOf(bandwidth[host], host)) {
      nearest = racks.size();
    }
    if (nearest == racks.size()) {
      racks.emplace_back();
    }
    racks[nearest].push_back(host);
    rack_of[host] = static_cast<int>(nearest);
  }
  return dense(rack_of);
}

}  // namespace torchext::core
