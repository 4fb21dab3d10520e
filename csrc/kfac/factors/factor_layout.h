// FactorLayout: where a factor lies among the others.
//
// All factors lie in flat buffers as packed upper triangles (packed_triangle.h), in the order of sending, the two
// of a layer side by side; a diagonal factor (of an embedding's inputs) as its diagonal.
#pragma once

#include <cstdint>

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
  // Elements of an inverse that travels: triangles, or eigenvalues and eigenvectors.
  std::int64_t inverseElements(InverseForm form) const {
    return diagonal || form == InverseForm::kInverse ? size : count * dim * (dim + 1);
  }
};

}  // namespace torchext
