// TiledProduct makes a layer's direction V = G^-1 dW A^-1 on the matrix tiles of the processor (kernels/cpu/tiles.h).
// That is 2 to 4 times as fast as BLAS in float and right to 16 bits, as much as an inverse of a damped factor in
// float.
//
// The inverses are laid out when they are new, once for all steps that use them. A step lays out the gradient,
// multiplies it by A^-1 block by block into the layout that the second product reads, and writes V. The result of a
// column does not depend on which others are computed, nor on threads: ranks that compute shares agree with one that
// computes all. Not thread-safe; uses torch's threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/ATen.h>

#include "kernels/cpu/tiles.h"

namespace torchext {

#if TORCHEXT_TILES
using TileBlocks = std::vector<cpu::TileBlock>;
#else
using TileBlocks = std::vector<std::byte>;  // never used
#endif

class TiledProduct {
 public:
  static bool available() { return cpu::cpuHasTiles(); }
  // Sizes from which on blocks of 32 are mostly full; of G and of A.
  static bool pays(std::int64_t outputs, std::int64_t inputs) { return outputs >= 32 && inputs >= 32; }

  // What layers can share: one is computed at a time.
  struct Work {
    TileBlocks gradient;
    TileBlocks middle;
    std::size_t bytes() const;
  };
  // dW of all groups: weight [groups * outputs, columns]; bias, if the layer has one that is not frozen, is the column
  // behind them.
  struct Gradient {
    const float* weight = nullptr;
    const float* bias = nullptr;
    std::int64_t columns = 0;
  };
  // Some columns of V: those of the weight lie together as a matrix; bias, if they end with its column.
  struct Result {
    float* weight = nullptr;
    float* bias = nullptr;
    std::int64_t columns = 0;  // of the weight
  };

  // outputs: G^-1 [groups, out, out]. inputs: A^-1 [groups, in, in], of which the columns from `begin` on are used,
  // `count` of them. Float, contiguous. Nothing is done where they are those of the last call.
  void prepare(const at::Tensor& outputs, const at::Tensor& inputs, std::int64_t begin, std::int64_t count);
  void compute(const Gradient& gradient, const Result& result, Work& work) const;
  // dW of one group as the sum of g a^T over `count` rows: inputs [count, columns]; gradients transposed, [out, count].
  // ones, if the layer has a bias that is not frozen: count of them, which are another column of the inputs.
  struct Rows {
    const float* inputs = nullptr;
    const float* ones = nullptr;
    const float* gradients = nullptr;
    std::int64_t count = 0;
    std::int64_t columns = 0;
  };
  // L = G^-1 g^T [out, count] and R = (a 1) A^-1 [count, columns that prepare() was given, which begin with the first]:
  // V is their product.
  void computeHalves(const Rows& given, float* left, float* right, Work& work) const;
  struct Halves {
    const float* left = nullptr;
    const float* right = nullptr;
    std::int64_t outputs = 0;
    std::int64_t count = 0;
    std::int64_t columns = 0;  // of right
  };
  static void joinHalves(const Halves& halves, const Result& result, Work& work);
  std::size_t bytes() const;

 private:
  at::Tensor of_outputs_;  // what is laid out
  at::Tensor of_inputs_;
  std::int64_t begin_ = 0;
  std::int64_t count_ = 0;
  TileBlocks outputs_;
  TileBlocks inputs_;
};

}  // namespace torchext
