#include "kfac/linalg/factor_inverse.h"

#include <cmath>
#include <limits>

#include "core/kfac/packed_triangle.h"
#include "kernels/cpu/scale.h"

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

// [count, dim, dim] of packed triangles / divisor, with damping on the diagonal; below it nothing is written.
template <class T>
at::Tensor dampedMean(const at::Tensor& packed, std::int64_t dim, double divisor, const at::Tensor& damping) {
  at::Tensor result = at::empty({damping.numel(), dim, dim}, packed.options());
  const T* from = packed.const_data_ptr<T>();
  T* to = result.mutable_data_ptr<T>();
  for (std::int64_t group = 0; group < damping.numel(); ++group) {
    for (std::int64_t count = dim; count > 0; --count) {
      cpu::scaleInto(to, from, static_cast<std::size_t>(count), static_cast<T>(1 / divisor));
      *to += damping.const_data_ptr<T>()[group];
      from += count;
      to += count > 1 ? dim + 1 : 1;
    }
  }
  return result;
}

// By LAPACK in place, of the upper triangle. False where the matrix is not positive definite. ATen's two functions
// spend as long again on copies and on clearing halves that nobody reads.
template <class T>
bool invertInPlace(T* matrix, std::int64_t dim) {
  const auto [decompose, invert] = cholesky<T>();
  const auto narrow = static_cast<int>(dim);
  const char lower = 'L';  // LAPACK counts by columns: what it sees there is the upper triangle
  int info = 0;
  decompose(&lower, &narrow, matrix, &narrow, &info);
  // NaN may pass with info 0: the last diagonal element depends on all others.
  if (info != 0 || !std::isfinite(matrix[dim * dim - 1])) {
    return false;
  }
  invert(&lower, &narrow, matrix, &narrow, &info);
  return info == 0;
}

// Undefined where a matrix is not positive definite.
template <class T>
at::Tensor choleskyInverse(const at::Tensor& packed, std::int64_t dim, double divisor, const at::Tensor& damping) {
  at::Tensor result = dampedMean<T>(packed, dim, divisor, damping);
  T* matrix = result.mutable_data_ptr<T>();
  const auto size = static_cast<std::size_t>(dim);
  const bool reachable = spotrf_ != nullptr && dpotrf_ != nullptr && spotri_ != nullptr && dpotri_ != nullptr;
  const bool by_lapack = reachable && dim <= std::numeric_limits<int>::max();
  for (std::int64_t group = 0; group < result.size(0); ++group, matrix += dim * dim) {
    if (by_lapack && !invertInPlace(matrix, dim)) {
      return {};
    }
    core::mirrorTriangle(matrix, size, size);
  }
  if (by_lapack) {
    return result;
  }
  const auto [lower, info] = at::linalg_cholesky_ex(result);
  // NaN passes through Cholesky with info 0 on some backends: the last diagonal element depends on all others.
  const bool good = info.eq(0).all().item<bool>() && lower.diagonal(0, -2, -1).isfinite().all().item<bool>();
  // By columns or by rows: it is symmetric.
  return good ? at::cholesky_inverse(lower).contiguous() : at::Tensor();
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

FactorInverse invertFactor(const at::Tensor& packed, std::int64_t dim, double divisor, const at::Tensor& damping,
                           InverseFailures& failures) {
  const bool doubles = packed.scalar_type() == at::kDouble;
  const auto invert = doubles ? &choleskyInverse<double> : &choleskyInverse<float>;
  at::Tensor inverse = invert(packed, dim, divisor, damping);
  if (!inverse.defined() && !doubles) {
    ++failures.retried;
    inverse = choleskyInverse<double>(packed.to(at::kDouble), dim, divisor, damping.to(at::kDouble));
    if (inverse.defined()) {
      inverse = inverse.to(packed.scalar_type());
    }
  }
  failures.kept += inverse.defined() ? 0 : 1;
  return {inverse, {}};
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
