#include "kfac/engine/timed_examples.h"

#include <cmath>
#include <memory>

#include "kfac/inverses/factor_batch.h"
#include "kfac/linalg/factor_inverse.h"
#include "kfac/linalg/matrix_product.h"
#include "kfac/precondition/tiled_product.h"

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

template <class T>
void multiplySquares(const at::Tensor& square, at::Tensor& result) {
  const std::int64_t size = square.size(0);
  const T* data = square.const_data_ptr<T>();
  multiply(false, true, size, size, size, data, size, data, size, T(0), result.mutable_data_ptr<T>(), size);
}

}  // namespace

std::function<int()> exampleInversion(const KfacContext& context, const FactorAccumulator& accumulator,
                                      std::int64_t dim, const at::Generator& generator) {
  const InverseForm form = context.options.form;
  const at::Tensor batch = exampleFactor(dim, form, generator).to(accumulator.options()).unsqueeze(0);
  const at::Tensor damping = at::full({1}, 0.1, batch.options());
  const FactorLayout layout{.dim = dim, .size = dim * (dim + 1) / 2};
  const at::Tensor packed = at::empty({layout.size}, batch.options());
  if (!context.on_device) {
    accumulator.pack(batch, layout, packed);
  }
  return [=, on_device = context.on_device] {
    InverseFailures ignored;
    if (on_device) {
      invertFactors({FactorToInvert{batch, damping}}, form, ignored);
    } else if (form == InverseForm::kEigen) {
      decomposeFactor(batch, ignored);
    } else {
      invertFactor(packed, dim, /*divisor=*/1, damping, ignored);
    }
    return 1;
  };
}

std::function<int()> exampleProducts(const KfacContext& context, const at::TensorOptions& options, std::int64_t size,
                                     bool tiles) {
  const at::Tensor square = at::ones({size, size}, options);
  at::Tensor result = at::empty_like(square);
  if (tiles) {
    const auto direction = std::make_shared<TiledProduct>();
    const auto work = std::make_shared<TiledProduct::Work>();
    direction->prepare(square.unsqueeze(0), square.unsqueeze(0), /*begin=*/0, size);
    return [=] {
      direction->compute({square.const_data_ptr<float>(), nullptr, size},
                         {result.mutable_data_ptr<float>(), nullptr, size}, *work);
      return 2;
    };
  }
  if (context.on_device) {
    return [square, result]() mutable {
      at::mm_out(result, square, square);
      return 1;
    };
  }
  const auto multiply_squares = options.dtype() == at::kDouble ? &multiplySquares<double> : &multiplySquares<float>;
  return [=]() mutable {
    multiply_squares(square, result);
    return 1;
  };
}

}  // namespace torchext
