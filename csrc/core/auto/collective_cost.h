// collective_cost states what collectives take by formula, and carries measured tables over to other networks by it.
//
//   n ranks, S bytes, a link with latency alpha and rate B; one half is a reduce-scatter or an all-gather, and an
//   all-reduce is two halves:
//     ring          (n - 1) alpha + (n - 1)/n S/B
//     direct        alpha + (n - 1)/n S/B
//     halving       log2(n) alpha + (n - 1)/n S/B: recursive halving and doubling, n a power of two
//     hierarchical  m ranks on each of h hosts, one link a host: a ring inside, then one between hosts
//   rows: every rank sends its batch rows to every other, (n - 1) (alpha + bytes/B)
// Pure functions. std::invalid_argument on a network that cannot be. Seconds and bytes.
#pragma once

#include <cstddef>
#include <string>

#include "core/auto/cost_table.h"

namespace torchext::core {

struct Link {
  double latency_seconds = 0;   // of one hop, 0 or more
  double bytes_per_second = 0;  // above 0
};

struct Network {
  int ranks = 1;
  Link link;               // between hosts, or between ranks where a host has one
  int ranks_per_host = 1;  // divides ranks
  Link inside = {};        // between ranks of a host; unused where ranks_per_host is 1
};

void checkNetwork(const Network& network);

enum class Algorithm { kRing, kDirect, kHalving, kHierarchical };
// "ring", "direct", "halving", "hierarchical"; std::invalid_argument naming the choices.
Algorithm parseAlgorithm(const std::string& name);
const char* toString(Algorithm algorithm);
// Halving takes a power of two; hierarchical several hosts of several ranks.
bool algorithmFits(Algorithm algorithm, const Network& network);

// One reduce-scatter, or one all-gather, of a buffer of that many bytes.
double halfSeconds(Algorithm algorithm, const Network& network, double bytes);
double allReduceSeconds(Algorithm algorithm, const Network& network, double bytes);
// bytes: of one rank's rows.
double rowsSeconds(const Network& network, double bytes);

// A layer whose gradient can be rebuilt on every rank from the rows of all ranks.
struct LayerRows {
  enum class Kind { kLinear, kEmbedding };
  Kind kind = Kind::kLinear;
  std::size_t rows = 0;    // of one rank and step, the most there are: K; 0: unknown
  std::size_t height = 0;  // of the weight: M outputs, or V places
  std::size_t width = 0;   // N inputs, or D
  std::size_t element_bytes = 4;
};
// What one rank sends to each other: K (M + N) e, or K (D e + 8) with the row's 64-bit index.
double rowBytes(const LayerRows& layer);
// K*: with fewer rows a rank, rows are fewer bytes than the all-reduce of the weight's gradient.
double fewestRowsToReduce(const LayerRows& layer, int ranks);
// Of K-row products beyond what a rank does for its own rows: 2 (n - 1) K M N; an embedding has none.
double extraOperations(const LayerRows& layer, int ranks);

enum class Operation { kAllReduce, kHalf, kRows };
// Measured on `from`, as it would be on `to`: each time keeps its ratio to the formula. `from` has two ranks or more.
CostTable scaledTable(const CostTable& measured, Operation operation, Algorithm algorithm, const Network& from,
                      const Network& to);

}  // namespace torchext::core
