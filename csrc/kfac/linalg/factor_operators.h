// The operators of torchext._kernels on factors (kernels/factor.h), called through the dispatcher: plain ATen or the
// kernels of the tensors' device. Queued on the current stream; nothing here waits.
#pragma once

#include <cstdint>

#include <ATen/ATen.h>

namespace torchext::operators {

// packed [groups, d(d+1)/2] = (or +=) the triangles of the sums of x x^T; samples [groups, count, inner], or
// by_dimension [groups, inner, count]; append_one: every x has a 1 more, d = inner + 1.
void packedGram(const at::Tensor& packed, const at::Tensor& samples, bool by_dimension, bool append_one, bool add);
void packTriangle(const at::Tensor& packed, const at::Tensor& full);
at::Tensor unpackTriangle(const at::Tensor& packed, std::int64_t dim);

}  // namespace torchext::operators
