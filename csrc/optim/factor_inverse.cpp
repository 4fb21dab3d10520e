#include "optim/factor_inverse.h"

#include <cmath>
#include <limits>

#include "core/packed_triangle.h"

// NOLINTBEGIN(readability-identifier-naming): the names of LAPACK
extern "C" {
__attribute__((weak)) void spotrf_(const char* uplo, const int* n, float* a, const int* lda, int* info);
__attribute__((weak)) void dpotrf_(const char* uplo, const int* n, double* a, const int* lda, int* info);
__attribute__((weak)) void spotri_(const char* uplo, const int* n, float* a, const int* lda, int* info);
__attribute__((weak)) void dpotri_(const char* uplo, const int* n, double* a, const int* lda, int* info);
}
// NOLINTEND(readability-identifier-naming)

namespace torchext {
namespace {

template <class T>
auto cholesky() {
  if constexpr (std::is_same_v<T, float>) {
    return std::pair(&spotrf_, &spotri_);
  } else {
    return std::pair(&dpotrf_, &dpotri_);
  }
}

// By LAPACK in place; undefined where the matrix is not positive definite. ATen's two functions spend as long again on
// copies and on clearing halves that nobody reads.
template <class T>
at::Tensor inverseInPlace(const at::Tensor& damped) {
  const auto [decompose, invert] = cholesky<T>();
  const std::int64_t dim = damped.size(-1);
  const auto narrow = static_cast<int>(dim);
  const char lower = 'L';  // LAPACK counts by columns: what it sees there is the upper triangle
  at::Tensor result = damped.clone(at::MemoryFormat::Contiguous);
  T* matrix = result.mutable_data_ptr<T>();
  for (std::int64_t group = 0; group < damped.size(0); ++group, matrix += dim * dim) {
    int info = 0;
    decompose(&lower, &narrow, matrix, &narrow, &info);
    // NaN may pass with info 0: the last diagonal element depends on all others.
    if (info != 0 || !std::isfinite(matrix[dim * dim - 1])) {
      return {};
    }
    invert(&lower, &narrow, matrix, &narrow, &info);
    if (info != 0) {
      return {};
    }
    core::mirrorTriangle(matrix, static_cast<std::size_t>(dim), static_cast<std::size_t>(dim));
  }
  return result;
}

at::Tensor choleskyInverse(const at::Tensor& damped) {
  const bool reachable = spotrf_ != nullptr && dpotrf_ != nullptr && spotri_ != nullptr && dpotri_ != nullptr;
  if (reachable && damped.size(-1) > 0 && damped.size(-1) <= std::numeric_limits<int>::max()) {
    return damped.scalar_type() == at::kDouble ? inverseInPlace<double>(damped) : inverseInPlace<float>(damped);
  }
  const auto [lower, info] = at::linalg_cholesky_ex(damped);
  // NaN passes through Cholesky with info 0 on some backends: the last diagonal element depends on all others.
  const bool good = info.eq(0).all().item<bool>() && lower.diagonal(0, -2, -1).isfinite().all().item<bool>();
  return good ? at::cholesky_inverse(lower) : at::Tensor();
}

FactorInverse eigenvectors(const at::Tensor& factor) {
  try {
    auto [values, vectors] = at::linalg_eigh(factor);
    if (values.isfinite().all().item<bool>() && vectors.isfinite().all().item<bool>()) {
      return {vectors.contiguous(), values.clamp_min(0)};
    }
  } catch (const c10::LinAlgError&) {  // did not converge
  }
  return {};
}

}  // namespace

FactorInverse invertFactor(const at::Tensor& factor, const at::Tensor& damping, InverseFailures& failures) {
  factor.diagonal(0, -2, -1).add_(damping.unsqueeze(-1));
  at::Tensor inverse = choleskyInverse(factor);
  if (!inverse.defined() && factor.scalar_type() != at::kDouble) {
    ++failures.retried;
    inverse = choleskyInverse(factor.to(at::kDouble));
    if (inverse.defined()) {
      inverse = inverse.to(factor.scalar_type());
    }
  }
  if (!inverse.defined()) {
    ++failures.kept;
    return {};
  }
  // Symmetric, and LAPACK leaves it by columns: read by rows it is the same matrix, and nothing is copied.
  return {inverse.is_contiguous() ? inverse : inverse.mT().contiguous(), {}};
}

FactorInverse decomposeFactor(const at::Tensor& factor, InverseFailures& failures) {
  FactorInverse result = eigenvectors(factor);
  if (!result.defined() && factor.scalar_type() != at::kDouble) {
    ++failures.retried;
    result = eigenvectors(factor.to(at::kDouble));
    if (result.defined()) {
      result = {result.matrix.to(factor.scalar_type()), result.values.to(factor.scalar_type())};
    }
  }
  failures.kept += result.defined() ? 0 : 1;
  return result;
}

}  // namespace torchext
