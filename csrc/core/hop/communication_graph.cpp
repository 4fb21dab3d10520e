#include "core/hop/communication_graph.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "core/base/enum_names.h"
#include "core/hop/graph_weights.h"

namespace torchext::core {
namespace {

using Neighbours = std::vector<std::vector<int>>;

constexpr EnumNames<GraphKind, 5> kGraphNames{{
    {GraphKind::kRing, "ring"},
    {GraphKind::kRingBased, "ring-based"},
    {GraphKind::kDoubleRing, "double-ring"},
    {GraphKind::kExponential, "exponential"},
    {GraphKind::kFull, "full"},
}};

// Adds rank -> rank + offset for the ranks of a cycle of `size` that begins at `first`.
void connectCycle(Neighbours& out, int first, int size, int offset) {
  for (int i = 0; i < size; ++i) {
    out[index(first + i)].push_back(first + (i + offset + size) % size);
  }
}

void connectRingBased(Neighbours& out, int first, int size) {
  connectCycle(out, first, size, 1);
  connectCycle(out, first, size, -1);
  connectCycle(out, first, size, size / 2);
}

void sortUnique(std::vector<int>& ranks) {
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
}

// Edges from rank to every rank along `edges`, -1: none.
std::vector<int> distances(const Neighbours& edges, int rank) {
  std::vector<int> distance(edges.size(), -1);
  std::vector<int> reached{rank};
  distance[index(rank)] = 0;
  for (std::size_t next = 0; next < reached.size(); ++next) {
    const int from = reached[next];
    for (const int to : edges[index(from)]) {
      if (distance[index(to)] < 0) {
        distance[index(to)] = distance[index(from)] + 1;
        reached.push_back(to);
      }
    }
  }
  return distance;
}

// Some rank that `distance` does not reach; -1: it reaches all.
int unreached(const std::vector<int>& distance) {
  const auto found = std::find(distance.begin(), distance.end(), -1);
  return found == distance.end() ? -1 : static_cast<int>(found - distance.begin());
}

[[noreturn]] void throwUnconnected(int from, int to) {
  throw std::invalid_argument(concat("communication graph: no path leads from rank ", from, " to rank ", to,
                                     "; allowed are strongly connected graphs: add edges"));
}

}  // namespace

GraphKind parseGraphKind(const std::string& name) { return parseEnum(kGraphNames, "graph", name); }

const char* toString(GraphKind kind) { return enumName(kGraphNames, "GraphKind", kind); }

CommunicationGraph::CommunicationGraph(Neighbours out)
    : in_(out.size()), out_(std::move(out)), in_weights_(in_.size()) {
  if (out_.empty()) {
    throwInvalid("size of the communication graph", 0, "1 or more ranks");
  }
  for (int rank = 0; rank < size(); ++rank) {
    out_[index(rank)].push_back(rank);
    sortUnique(out_[index(rank)]);
    for (const int to : out_[index(rank)]) {
      in_[index(to)].push_back(rank);
    }
  }
  if (const int rank = unreached(distances(out_, 0)); rank >= 0) {
    throwUnconnected(0, rank);
  }
  if (const int rank = unreached(distances(in_, 0)); rank >= 0) {
    throwUnconnected(rank, 0);
  }
}

CommunicationGraph CommunicationGraph::builtIn(GraphKind kind, int size) {
  if (size < 1 || (kind == GraphKind::kDoubleRing && size % 2 != 0)) {
    throwInvalid(
        "size", size,
        concat(kind == GraphKind::kDoubleRing ? "even, 2 or more" : "1 or more", " for graph ", toString(kind)));
  }
  Neighbours out(index(size));
  switch (kind) {
    case GraphKind::kRing:
      connectCycle(out, 0, size, 1);
      connectCycle(out, 0, size, -1);
      break;
    case GraphKind::kRingBased:
      connectRingBased(out, 0, size);
      break;
    case GraphKind::kDoubleRing:
      connectRingBased(out, 0, size / 2);
      connectRingBased(out, size / 2, size / 2);
      connectCycle(out, 0, size, size / 2);
      break;
    case GraphKind::kExponential:
      for (std::int64_t offset = 1; offset < size; offset *= 2) {
        connectCycle(out, 0, size, static_cast<int>(offset));
      }
      break;
    case GraphKind::kFull:
      for (int offset = 1; offset < size; ++offset) {
        connectCycle(out, 0, size, offset);
      }
      break;
  }
  CommunicationGraph graph(std::move(out));
  graph.in_weights_ = uniformWeights(graph.in_);
  return graph;
}

CommunicationGraph CommunicationGraph::fromNeighbours(const Neighbours& out_neighbours) {
  const int size = static_cast<int>(out_neighbours.size());
  for (int rank = 0; rank < size; ++rank) {
    std::vector<int> named = out_neighbours[index(rank)];
    std::sort(named.begin(), named.end());
    for (const int to : named) {
      if (to < 0 || to >= size) {
        throwInvalid("neighbour", to, concat("0..", size - 1, "; rank ", rank, " names it"));
      }
    }
    const auto twice = std::adjacent_find(named.begin(), named.end());
    if (twice != named.end()) {
      throwInvalid("neighbour", *twice, concat("each neighbour once; rank ", rank, " names it twice"));
    }
  }
  CommunicationGraph graph(out_neighbours);
  graph.in_weights_ = doublyStochasticWeights(graph.in_, graph.out_);
  return graph;
}

CommunicationGraph CommunicationGraph::fromWeights(const std::vector<std::vector<double>>& weights) {
  checkDoublyStochastic(weights);
  Neighbours out(weights.size());
  for (std::size_t from = 0; from < weights.size(); ++from) {
    for (std::size_t to = 0; to < weights.size(); ++to) {
      if (weights[from][to] > 0) {
        out[from].push_back(static_cast<int>(to));
      }
    }
  }
  CommunicationGraph graph(std::move(out));
  for (std::size_t to = 0; to < weights.size(); ++to) {
    for (const int from : graph.in_[to]) {
      graph.in_weights_[to].push_back(weights[index(from)][to]);
    }
  }
  return graph;
}

double CommunicationGraph::weight(int from, int to) const {
  checkIndex("rank", from, size());
  const auto& in = inNeighbours(to);
  const auto found = std::lower_bound(in.begin(), in.end(), from);
  return found == in.end() || *found != from ? 0.0
                                             : in_weights_[index(to)][static_cast<std::size_t>(found - in.begin())];
}

int CommunicationGraph::smallestInDegree() const {
  const auto fewer = [](const auto& a, const auto& b) { return a.size() < b.size(); };
  return static_cast<int>(std::min_element(in_.begin(), in_.end(), fewer)->size());
}

std::vector<int> CommunicationGraph::pathLengthsFrom(int rank) const {
  checkIndex("rank", rank, size());
  return distances(out_, rank);
}

int CommunicationGraph::pathLength(int from, int to) const {
  checkIndex("rank", to, size());
  return pathLengthsFrom(from)[index(to)];
}

}  // namespace torchext::core
