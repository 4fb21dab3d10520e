#include "optim/factor_inverse.h"

namespace torchext {
namespace {

at::Tensor choleskyInverse(const at::Tensor& damped) {
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
