// FactorInverse is the inverse of one of K-FAC's factors; here is also what happens when LAPACK gives up.
//
// Two forms: the inverse of the damped factor, by Cholesky, or its eigenvectors and eigenvalues, undamped. A failure in
// float32 (a matrix that is not positive definite to rounding; a rank-deficient one on which syevd does not converge)
// is tried again in float64; if that fails too, the result is empty and the caller keeps what it had.
#pragma once

#include <cstdint>

#include <ATen/ATen.h>

namespace torchext {

enum class InverseForm { kInverse, kEigen };

struct FactorInverse {
  // [count, d, d]: the inverse, or eigenvectors as columns; of a diagonal factor [d]: the inverse, or the factor
  // itself.
  at::Tensor matrix;
  at::Tensor values;  // eigenvalues [count, d], not below 0; of eigenvectors only
  bool defined() const { return matrix.defined(); }
};

struct InverseFailures {
  std::int64_t retried = 0;  // in float64
  std::int64_t kept = 0;     // failed there too: the last good inverse is used on
};

// On the CPU. packed: the triangles of count matrices, dim wide, finite, contiguous, that are `divisor` times the
// factor. damping: [count], added to the factor's diagonal here and nowhere else.
FactorInverse invertFactor(const at::Tensor& packed, std::int64_t dim, double divisor, const at::Tensor& damping,
                           InverseFailures& failures);
// factor: [count, d, d], symmetric and finite.
FactorInverse decomposeFactor(const at::Tensor& factor, InverseFailures& failures);

}  // namespace torchext
