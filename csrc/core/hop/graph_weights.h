// graph_weights finds doubly stochastic weights for a directed graph with self loops: how much each model counts in an
// average (Luo et al., ASPLOS 2019, section 2.2). Private to csrc/core; communication_graph.h is the way in.
//
// A graph is given by sorted lists of neighbours, the rank itself included; weights are those of the in-neighbours, in
// their order. Pure functions: equal input, equal output.
#pragma once

#include <vector>

namespace torchext::core {

// Allowed distance of a sum of a user's weights from 1: rows that were written as float.
inline constexpr double kWeightTolerance = 1e-6;

// 1 / in-degree: doubly stochastic where every rank has as many in as out edges, and all ranks equally many.
std::vector<std::vector<double>> uniformWeights(const std::vector<std::vector<int>>& in);

// For a strongly connected graph:
//   edges both ways throughout  Metropolis: W_ij = 1 / max(degree of i, of j), self loops counted in the degree; the
//                               rest of 1 stays with the own model
//   all degrees equal           uniform
//   otherwise                   the only doubly stochastic matrix D A E of the adjacency matrix A, by Sinkhorn and
//                               Knopp's alternate scaling of rows and columns, to 1e-12
// std::invalid_argument when the scaling does not converge. O(edges), scaling O(edges * rounds).
std::vector<std::vector<double>> doublyStochasticWeights(const std::vector<std::vector<int>>& in,
                                                         const std::vector<std::vector<int>>& out);

// weights[from][to], square. std::invalid_argument, with rank and value, unless finite, not negative, positive on the
// diagonal, and with rows and columns that sum to 1 within kWeightTolerance.
void checkDoublyStochastic(const std::vector<std::vector<double>>& weights);

}  // namespace torchext::core
