// Reduction is the arithmetic of a reduction on raw memory, one table of functions a dtype.
#pragma once

#include <cstddef>

#include <c10/core/ScalarType.h>

namespace torchext {

struct Reduction {
  std::size_t element_bytes;
  // destination[i] += source[i]
  void (*add)(void* destination, const void* source, std::size_t count);
  // destination[i] = (destination[i] + source[i]) * scale
  void (*add_scaled)(void* destination, const void* source, std::size_t count, double scale);
  // destination[i] *= scale
  void (*multiply)(void* destination, std::size_t count, double scale);
};

// float32, float64, float16, bfloat16. Throws c10::TypeError naming the dtype and the choices for any other.
const Reduction& reductionFor(c10::ScalarType dtype);

}  // namespace torchext
