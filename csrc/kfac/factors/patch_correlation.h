// The factor A of a convolution without its patches: sums of products of an image with itself, shifted.
//
// For a stride of 1 the product of what the places k and k' see, summed over *all* positions, depends on k' - k alone:
//   sum over t of a_k(t) a_k'(t) = sum over s of x(s) x(s + k' - k)
// These are K (2K - 1) numbers a pair of channels for a K x K kernel, by symmetry, in place of K^4 / 2, and they are
// the weight gradient of a convolution of x with itself, which oneDNN computes without an im2col. Positions outside the
// output (where a kernel over zero padding would still touch the image) are counted too many: a frame of lines around
// the image, whose patches are made and whose products are subtracted.
//
// For 3 x 3 kernels about a third of the flops of patches, and no memory of K^2 times the input. Thread-safe, one
// thread a Scratch.
#pragma once

#include <cstdint>

#include <ATen/ATen.h>

#include "kfac/base/kfac_layer.h"

namespace torchext {

// Whether it is possible (two dimensions, stride and dilation 1, one group) and clearly fewer flops.
bool patchCorrelationPays(const KfacLayerSpec& spec, const at::Tensor& input);

// The upper triangle of out[dim, dim], rows dim apart: the sum of a a^T over samples and positions of `input`
// [N, C, H, W] or [C, H, W], the 1 of a bias included.
template <class T>
void correlatePatches(const KfacLayerSpec& spec, const at::Tensor& input, Scratch& scratch, T* out);

}  // namespace torchext
