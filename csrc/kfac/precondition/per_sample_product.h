// PerSampleProduct is a Linear layer's direction in two halves, made of the rows of which the layer's gradient is made.
//
// dW = f sum g (a 1)^T over the rows, f being whatever factor averages, loss scales and clips by norm have left. Then V
// = G^-1 dW A^-1 = f L R, with L = G^-1 g^T, [out, rows], and R = (a 1) A^-1, [rows, in + 1]. Neither needs dW, and so
// they are made while it is on its way. When it has come, two things remain: to find f, and to write the product.
//
// What has come into .grad besides (a penalty on the weight, another use of it, noise, a clip by value) would be left
// out. So it is compared first, by its product with one vector of signs: what is in it beyond the rows would have to be
// orthogonal to that, or as small as what such sums are rounded by. Where it differs there is no f.
//
// CPU tensors of type T, float or double, contiguous. Thread-safe, but for the work memory that is passed.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/ATen.h>

#include "kfac/precondition/tiled_product.h"

namespace torchext {

struct PerSampleProduct {
  at::Tensor left;          // L; undefined: not all rows are known, or there are none
  at::Tensor right;         // R; its last column is that of a bias
  std::int64_t inputs = 0;  // without the 1
  bool bias = false;        // whether rows end with a 1: the bias is trained
  double product = 0;       // <L R, sum g (a 1)^T>
  // What a gradient is compared with: the rows' sum times the vector of signs, that of g, and how much they could be
  // rounded by, relative to f.
  std::vector<double> times_signs;
  std::vector<double> ones;
  double weight_rounding = 0;
  double bias_rounding = 0;
};

// One that is written: factor L R.
struct WrittenGradient {
  at::Tensor weight;  // [out, in]; undefined: it is not
  at::Tensor bias;    // [out]; undefined where the layer has none that is trained
  double factor = 0;
};

// inputs [rows, in], gradients [rows, out]. inverse_of_inputs, A^-1 [dim, dim], is one wider than `in` where the layer
// has a bias, trained or not; inverse_of_outputs [out, out]. tiled: prepared for all of A^-1's columns; null: none.
template <class T>
PerSampleProduct makePerSampleProduct(const at::Tensor& inputs, const at::Tensor& gradients, bool bias,
                                      const at::Tensor& inverse_of_inputs, const at::Tensor& inverse_of_outputs,
                                      const TiledProduct* tiled, TiledProduct::Work& work);

// weight [out, in] times the vector of signs. Not finite only if the weight is not, or on the edge of it.
template <class T>
std::vector<double> timesSigns(const T* weight, std::int64_t out, std::int64_t in);

// f of a gradient, given by its product with the signs and that of its bias [out], or null. expected: the most likely
// f, taken if it fits.
template <class T>
std::optional<double> factorOf(const PerSampleProduct& made, const std::vector<double>& times_signs, const T* bias,
                               double expected);

// weight [out, in], and bias [out] if not null, = factor L R.
template <class T>
void writePerSampleProduct(const PerSampleProduct& made, double factor, bool tiles, T* weight, T* bias,
                           TiledProduct::Work& work);

}  // namespace torchext
