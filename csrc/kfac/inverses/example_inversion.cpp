#include "kfac/inverses/example_inversion.h"

#include <cmath>

#include "kfac/inverses/factor_batch.h"
#include "kfac/linalg/factor_inverse.h"

namespace torchext {
namespace {

// Well conditioned. Of full rank for eigenvectors, whose search ends sooner with fewer; Cholesky takes its time
// whatever the elements are, and the script waits for this.
at::Tensor exampleFactor(std::int64_t dim, InverseForm form, const at::Generator& generator) {
  if (form == InverseForm::kInverse) {
    return at::eye(dim).mul_(2);
  }
  const at::Tensor noise = at::rand({dim, dim}, generator);
  const double radius = 2 * std::sqrt(static_cast<double>(dim) / 6);  // of the symmetric part's spectrum (Wigner)
  return (noise + noise.t()).sub_(1).div_(radius).add_(at::eye(dim), 2);
}

}  // namespace

std::function<void()> exampleInversion(const KfacContext& context, const FactorAccumulator& accumulator,
                                       std::int64_t dim, const at::Generator& generator) {
  const InverseForm form = context.options.form;
  const at::Tensor batch = exampleFactor(dim, form, generator).to(accumulator.options()).unsqueeze(0);
  const at::Tensor damping = at::full({1}, 0.1, batch.options());
  InverseFailures ignored;
  if (context.on_device) {
    return [=]() mutable { invertFactors({FactorToInvert{batch, damping}}, form, ignored); };
  }
  if (form == InverseForm::kEigen) {
    return [=]() mutable { decomposeFactor(batch, ignored); };
  }
  const FactorLayout layout{.dim = dim, .size = dim * (dim + 1) / 2};
  const at::Tensor packed = at::empty({layout.size}, batch.options());
  accumulator.pack(batch, layout, packed);
  return [=]() mutable { invertFactor(packed, dim, /*divisor=*/1, damping, ignored); };
}

}  // namespace torchext
