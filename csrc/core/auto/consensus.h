// consensus says how far the models of inexact ways stay apart: rho, the share of their variance that one average
// leaves (0: all are equal again, 1: nothing was mixed).
//
// Pure functions. std::invalid_argument names a bad value.
#pragma once

#include <vector>

namespace torchext::core {

// Random disjoint groups of g among n ranks: (n - g) / (g (n - 1)). 1 <= group <= ranks.
double groupRho(int ranks, int group);

// x_i <- sum of weights[j][i] x_j with a doubly stochastic matrix W: the square of its second largest singular value,
// which is lambda2(W)^2 where W is symmetric. By Lanczos' iteration on W^T W, orthogonal to the mean. O(ranks^2) a
// step, and O(edges) where the matrix is sparse.
double mixingRho(const std::vector<std::vector<double>>& weights);

}  // namespace torchext::core
