#include "kfac/factors/factor_slot.h"

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

at::Tensor unpackedFactor(const at::Tensor& packed, const FactorSlot& slot) {
  if (slot.diagonal) {
    return packed.clone();
  }
  at::Tensor full = at::empty({slot.count, slot.dim, slot.dim}, packed.options());
  withType(packed.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const T* from = packed.const_data_ptr<T>();
    T* to = full.mutable_data_ptr<T>();
    const auto dim = static_cast<std::size_t>(slot.dim);
    for (std::int64_t group = 0; group < slot.count; ++group) {
      core::unpackTriangle(from + group * slot.triangle(), dim, to + group * slot.dim * slot.dim, dim);
    }
  });
  return full;
}

void packFactor(const at::Tensor& full, const FactorSlot& slot, const at::Tensor& packed) {
  withType(packed.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const auto dim = static_cast<std::size_t>(slot.dim);
    for (std::int64_t group = 0; group < slot.count; ++group) {
      core::packTriangle(full.const_data_ptr<T>() + group * slot.dim * slot.dim, dim, dim,
                         packed.mutable_data_ptr<T>() + group * slot.triangle());
    }
  });
}

at::Tensor tracesOfFactor(const at::Tensor& packed, const FactorSlot& slot) {
  at::Tensor traces = at::empty({slot.count}, at::kDouble);
  withType(packed.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const T* from = packed.const_data_ptr<T>();
    for (std::int64_t group = 0; group < slot.count; ++group) {
      const T* triangle = from + group * slot.triangle();
      traces.mutable_data_ptr<double>()[group] =
          slot.diagonal ? static_cast<double>(std::accumulate(triangle, triangle + slot.dim, T(0)))
                        : static_cast<double>(core::packedTrace(triangle, static_cast<std::size_t>(slot.dim)));
    }
  });
  return traces;
}

std::int64_t inverseElements(const FactorSlot& slot, InverseForm form) {
  if (slot.diagonal || form == InverseForm::kInverse) {
    return slot.size;
  }
  return slot.count * slot.dim * (slot.dim + 1);
}

}  // namespace torchext
