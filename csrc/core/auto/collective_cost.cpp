#include "core/auto/collective_cost.h"

#include <bit>
#include <cmath>

#include "core/base/check.h"
#include "core/base/enum_names.h"

namespace torchext::core {
namespace {

constexpr EnumNames<Algorithm, 4> kAlgorithms{{{Algorithm::kRing, "ring"},
                                               {Algorithm::kDirect, "direct"},
                                               {Algorithm::kHalving, "halving"},
                                               {Algorithm::kHierarchical, "hierarchical"}}};
constexpr double kRowIndexBytes = 8;  // which place of an embedding a row belongs to

void checkLink(const Link& link) {
  if (!std::isfinite(link.latency_seconds) || link.latency_seconds < 0) {
    throwInvalid("latency_seconds", link.latency_seconds, "finite, 0 or more");
  }
  checkPositive("bytes_per_second", link.bytes_per_second);
}

bool powerOfTwo(int ranks) { return std::has_single_bit(static_cast<unsigned>(ranks)); }

// `hops` messages one after the other, and all but the own share of the bytes over the link.
double halfOn(const Link& link, int hops, int ranks, double bytes) {
  return hops * link.latency_seconds + (ranks - 1.0) / ranks * bytes / link.bytes_per_second;
}

double formula(Operation operation, Algorithm algorithm, const Network& network, double bytes) {
  switch (operation) {
    case Operation::kAllReduce:
      return allReduceSeconds(algorithm, network, bytes);
    case Operation::kHalf:
      return halfSeconds(algorithm, network, bytes);
    case Operation::kRows:
      break;
  }
  return rowsSeconds(network, bytes);
}

}  // namespace

Algorithm parseAlgorithm(const std::string& name) { return parseEnum(kAlgorithms, "algorithm", name); }
const char* toString(Algorithm algorithm) { return enumName(kAlgorithms, "Algorithm", algorithm); }

void checkNetwork(const Network& network) {
  if (network.ranks < 1) {
    throwInvalid("ranks", network.ranks, "1 or more");
  }
  if (network.ranks_per_host < 1 || network.ranks % network.ranks_per_host != 0) {
    throwInvalid("ranks_per_host", network.ranks_per_host, concat("a divisor of the ranks, ", network.ranks));
  }
  checkLink(network.link);
}

bool algorithmFits(Algorithm algorithm, const Network& network) {
  switch (algorithm) {
    case Algorithm::kHalving:
      return powerOfTwo(network.ranks);
    case Algorithm::kHierarchical:
      return network.ranks_per_host > 1 && network.ranks > network.ranks_per_host &&
             network.inside.bytes_per_second > 0;
    default:
      return true;
  }
}

double halfSeconds(Algorithm algorithm, const Network& network, double bytes) {
  checkNetwork(network);
  const int ranks = network.ranks;
  if (ranks == 1) {
    return 0;
  }
  switch (algorithm) {
    case Algorithm::kDirect:
      return halfOn(network.link, 1, ranks, bytes);
    case Algorithm::kHalving:
      if (!powerOfTwo(ranks)) {
        throwInvalid("ranks", ranks, "a power of two, for halving");
      }
      return halfOn(network.link, std::countr_zero(static_cast<unsigned>(ranks)), ranks, bytes);
    case Algorithm::kHierarchical: {
      checkLink(network.inside);
      const int on_host = network.ranks_per_host;
      const int hosts = ranks / on_host;
      return halfOn(network.inside, on_host - 1, on_host, bytes) + halfOn(network.link, hosts - 1, hosts, bytes);
    }
    case Algorithm::kRing:
      break;
  }
  return halfOn(network.link, ranks - 1, ranks, bytes);
}

double allReduceSeconds(Algorithm algorithm, const Network& network, double bytes) {
  return 2 * halfSeconds(algorithm, network, bytes);
}

double rowsSeconds(const Network& network, double bytes) {
  checkNetwork(network);
  return (network.ranks - 1) * (network.link.latency_seconds + bytes / network.link.bytes_per_second);
}

double rowBytes(const LayerRows& layer) {
  const auto rows = static_cast<double>(layer.rows);
  const auto width = static_cast<double>(layer.width);
  const auto element = static_cast<double>(layer.element_bytes);
  return layer.kind == LayerRows::Kind::kLinear ? rows * (static_cast<double>(layer.height) + width) * element
                                                : rows * (width * element + kRowIndexBytes);
}

double fewestRowsToReduce(const LayerRows& layer, int ranks) {
  LayerRows one_row = layer;
  one_row.rows = 1;
  const double gradient_bytes =
      static_cast<double>(layer.height) * static_cast<double>(layer.width) * static_cast<double>(layer.element_bytes);
  return 2 * gradient_bytes / (ranks * rowBytes(one_row));
}

double extraOperations(const LayerRows& layer, int ranks) {
  if (layer.kind == LayerRows::Kind::kEmbedding) {
    return 0;
  }
  return 2 * (ranks - 1.0) * static_cast<double>(layer.rows) * static_cast<double>(layer.height) *
         static_cast<double>(layer.width);
}

CostTable scaledTable(const CostTable& measured, Operation operation, Algorithm algorithm, const Network& from,
                      const Network& to) {
  if (from.ranks < 2) {
    throwInvalid("ranks of the measured network", from.ranks, "2 or more");
  }
  std::vector<CostPoint> points;
  for (const auto& [bytes, seconds] : measured.points()) {
    const auto size = static_cast<double>(bytes);
    const double before = formula(operation, algorithm, from, size);
    const double after = formula(operation, algorithm, to, size);
    points.push_back({bytes, before > 0 ? seconds * (after / before) : seconds});
  }
  return CostTable(points);
}

}  // namespace torchext::core
