#include "kfac/factors/factor_layout.h"

#include <numeric>

#include "core/kfac/packed_triangle.h"

namespace torchext {
namespace {

template <class Body>
void withType(at::ScalarType type, const Body& body) {
  if (type == at::kDouble) {  // NOLINT(bugprone-branch-clone): the types differ
    body(double());
  } else {
    body(float());
  }
}

}  // namespace

at::Tensor unpackedFactor(const at::Tensor& packed, const FactorLayout& layout) {
  if (layout.diagonal) {
    return packed.clone();
  }
  at::Tensor full = at::empty({layout.count, layout.dim, layout.dim}, packed.options());
  withType(packed.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const T* from = packed.const_data_ptr<T>();
    T* to = full.mutable_data_ptr<T>();
    const auto dim = static_cast<std::size_t>(layout.dim);
    for (std::int64_t group = 0; group < layout.count; ++group) {
      core::unpackTriangle(from + group * layout.triangle(), dim, to + group * layout.dim * layout.dim, dim);
    }
  });
  return full;
}

void packFactor(const at::Tensor& full, const FactorLayout& layout, const at::Tensor& packed) {
  withType(packed.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const auto dim = static_cast<std::size_t>(layout.dim);
    for (std::int64_t group = 0; group < layout.count; ++group) {
      core::packTriangle(full.const_data_ptr<T>() + group * layout.dim * layout.dim, dim, dim,
                         packed.mutable_data_ptr<T>() + group * layout.triangle());
    }
  });
}

at::Tensor tracesOfFactor(const at::Tensor& packed, const FactorLayout& layout) {
  at::Tensor traces = at::empty({layout.count}, at::kDouble);
  withType(packed.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const T* from = packed.const_data_ptr<T>();
    for (std::int64_t group = 0; group < layout.count; ++group) {
      const T* triangle = from + group * layout.triangle();
      traces.mutable_data_ptr<double>()[group] =
          layout.diagonal ? static_cast<double>(std::accumulate(triangle, triangle + layout.dim, T(0)))
                          : static_cast<double>(core::packedTrace(triangle, static_cast<std::size_t>(layout.dim)));
    }
  });
  return traces;
}

std::int64_t inverseElements(const FactorLayout& layout, InverseForm form) {
  if (layout.diagonal || form == InverseForm::kInverse) {
    return layout.size;
  }
  return layout.count * layout.dim * (layout.dim + 1);
}

}  // namespace torchext
