// buffer_mean averages buffers: exactly where all workers hold the same value, whatever it is.
//
// Buffers are not only statistics. Masks hold -inf or the least number there is, tables hold constants: what is the
// same everywhere comes out as it went in, to the bit, in any number of workers and any order of addition. So sums are
// formed with bits to spare: those of 16 and 32 bits as float64, float64 as two halves of its digits, each with 26 bits
// of room (and 32 binary orders below, so that no sum of the largest numbers overflows; what is lost of that lies under
// 1e-280).
//
// Threads: functions of their arguments. All tensors are 1-D, floating point, on the CPU.
#pragma once

#include <cstdint>

#include <ATen/ATen.h>

namespace torchext {

// What the workers add up, elementwise: a new tensor, float64.
at::Tensor toSum(const at::Tensor& values);
// mean = what the sum of `count` workers says.
void toMean(const at::Tensor& sum, std::int64_t count, const at::Tensor& mean);

// after - before, and 0 where they are the same, infinite ones included.
at::Tensor change(const at::Tensor& after, const at::Tensor& before);
// mean + change(now, before): the mean, and what has been written since; `now` where that is not a finite number.
at::Tensor carry(const at::Tensor& mean, const at::Tensor& now, const at::Tensor& before);

// Where neither is negative, as with variances, which no sum with a change may make so.
at::Tensor nonnegative(const at::Tensor& mean, const at::Tensor& before);
// `moved`, or `now` where moved alone is negative, and `nonnegative` says so of what it was formed from.
at::Tensor keepSign(const at::Tensor& moved, const at::Tensor& now, const at::Tensor& nonnegative);

}  // namespace torchext
