// CommunicationGraph says who sends its model to whom in decentralized training, and how much it counts (Luo et al.,
// "Hop", ASPLOS 2019, sections 2.2 and 7).
//
// A directed graph over ranks 0..size-1. An edge j -> i: i receives j's model in each iteration. Every rank has a self
// loop: its own model is one of those it averages. weight(j, i) is the share of j's model in i's average, W_ji of
//   x_i <- sum over in-neighbours j of W_ji x_j.
// The weights are doubly stochastic (what a rank takes sums to 1, and so does what is taken of it), so averaging keeps
// the mean of all models; the graph is strongly connected, so all models reach it. Both are checked.
//
// An immutable value that every rank builds alike. Threads: safe to read from many.
#pragma once

#include <string>
#include <vector>

#include "core/base/check.h"
#include "core/hop/graph_weights.h"

namespace torchext::core {

// Built-in graphs, self loops besides. Weights are uniform, 1 / in-degree (every rank has the same number of edges).
//   ring          to both sides: i -> i - 1, i + 1
//   ring-based    the ring and a chord i -> i + size / 2 (rounded down): the opposite worker where size is even
//   double-ring   two ring-based graphs of size / 2 ranks each; rank i of one is joined to rank i of the other, both
//                 ways. size is even
//   exponential   i -> i + 1, i + 2, i + 4 ... below size
//   full          everybody to everybody
// Edges that coincide (small sizes) count once.
enum class GraphKind { kRing, kRingBased, kDoubleRing, kExponential, kFull };

// The names above; throws std::invalid_argument naming the choices.
GraphKind parseGraphKind(const std::string& name);
const char* toString(GraphKind kind);

class CommunicationGraph {
 public:
  // std::invalid_argument unless size >= 1 (double-ring: even, too).
  static CommunicationGraph builtIn(GraphKind kind, int size);

  // out_neighbours[rank]: whom rank sends to, in any order; self loops are added. Weights: Metropolis where all edges
  // go both ways, else uniform or scaled (graph_weights.h). std::invalid_argument on an empty list, a neighbour that
  // does not exist or is named twice, a graph that is not strongly connected, or a scaling that does not converge (pass
  // weights then); the message names the ranks.
  static CommunicationGraph fromNeighbours(const std::vector<std::vector<int>>& out_neighbours);

  // weights[from][to]: W, size x size. There is an edge where a weight is more than 0. std::invalid_argument unless it
  // is square, finite, not negative, positive on the diagonal, doubly stochastic within kWeightTolerance and strongly
  // connected; the message has rank and value.
  static CommunicationGraph fromWeights(const std::vector<std::vector<double>>& weights);

  int size() const { return static_cast<int>(in_.size()); }

  // Sorted, the rank itself included: N_in and N_out of the paper. std::out_of_range on rank.
  const std::vector<int>& inNeighbours(int rank) const {
    checkIndex("rank", rank, size());
    return in_[index(rank)];
  }
  const std::vector<int>& outNeighbours(int rank) const {
    checkIndex("rank", rank, size());
    return out_[index(rank)];
  }
  // The shares of inNeighbours(rank), in their order; they sum to 1.
  const std::vector<double>& inWeights(int rank) const {
    checkIndex("rank", rank, size());
    return in_weights_[index(rank)];
  }
  // 0 where there is no edge.
  double weight(int from, int to) const;
  // Fewest in-neighbours of a rank, itself included.
  int smallestInDegree() const;

  // Edges of the shortest directed path from a rank to every other, 0 to itself. O(edges): keep what you ask often.
  std::vector<int> pathLengthsFrom(int rank) const;
  int pathLength(int from, int to) const;

 private:
  // Sorts, checks and connects; in_weights_ are still empty.
  explicit CommunicationGraph(std::vector<std::vector<int>> out);

  std::vector<std::vector<int>> in_;
  std::vector<std::vector<int>> out_;
  std::vector<std::vector<double>> in_weights_;
};

}  // namespace torchext::core
