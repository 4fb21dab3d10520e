// chooseRows() picks the layers whose directions K-FAC makes from all ranks' batch rows, not from the mean gradient.
//
// A direction V = G^-1 dW A^-1 takes out^2 in + out in^2 multiplications. Where dW is a sum g a^T over `rows` rows, V =
// sum (G^-1 g)(A^-1 a)^T takes rows (out^2 + in^2 + out in): with few rows a fraction. The rows have to be brought
// together, and compared with the gradient.
//
// Pure functions; every rank must pass the same numbers to come to the same choice.
#pragma once

#include <cstddef>
#include <vector>

#include "core/transport/alpha_beta.h"

namespace torchext::core {

// Of the multiplications of a direction of the whole gradient; above 1 where rows are many. inputs: with the bias.
double shareOfRows(std::size_t outputs, std::size_t inputs, std::size_t rows);

struct RowLayer {
  std::size_t outputs = 0;
  std::size_t inputs = 0;
  std::size_t rows = 0;   // of all ranks; 0: this layer has none
  std::size_t bytes = 0;  // of rows that each rank sends to every other
  double seconds = 0;     // of a direction of its whole gradient, all of it
  double otherwise = 0;   // what a direction takes a rank without rows: less, where ranks make shares of it
  bool together = false;  // all of these, or none of them
};
// gather: of the bytes of one rank until all ranks have those of all. None are chosen unless together they save more
// than it takes to begin. ahead: with rows of all layers directions are written before the gradients are there, which
// may be worth those of layers that would be cheaper without.
std::vector<bool> chooseRows(const std::vector<RowLayer>& layers, const AlphaBeta& gather, bool ahead);

}  // namespace torchext::core
