// FactorLayout: where a factor lies among the others, and what can be done with its packed triangles on the CPU.
//
// All factors lie in flat buffers as packed upper triangles (packed_triangle.h), in the order of sending, the two
// of a layer side by side; a diagonal factor (of an embedding's inputs) as its diagonal. Plain functions, one thread a
// buffer.
#pragma once

#include <cstdint>

#include <ATen/ATen.h>

#include "kfac/linalg/factor_inverse.h"

namespace torchext {

struct FactorLayout {
  int layer = 0;
  bool input_side = false;  // A, else G
  bool diagonal = false;
  std::int64_t dim = 0;
  std::int64_t count = 1;   // groups
  std::int64_t offset = 0;  // elements
  std::int64_t size = 0;    // elements of all groups
  std::int64_t triangle() const { return size / count; }
};

// [count, dim, dim] from packed triangles; a copy of a diagonal.
at::Tensor unpackedFactor(const at::Tensor& packed, const FactorLayout& layout);
// The triangles of full [count, dim, dim] into packed.
void packFactor(const at::Tensor& full, const FactorLayout& layout, const at::Tensor& packed);
// [count] in float64, of a packed factor.
at::Tensor tracesOfFactor(const at::Tensor& packed, const FactorLayout& layout);
// Elements of an inverse that travels: triangles, or eigenvalues and eigenvectors.
std::int64_t inverseElements(const FactorLayout& layout, InverseForm form);

}  // namespace torchext
