// Sums over raw memory, written so that the compiler makes vectors of them: a plain float sum keeps its order. The same
// bits on every x86-64 processor. One thread; any number may run at once.
#pragma once

#include <cstdint>

#include <ATen/ATen.h>

namespace torchext {

template <class T>
bool allFinite(const T* data, std::int64_t count);
// Whether all elements of a gradient are finite; any layout and type.
bool isFinite(const at::Tensor& tensor);

template <class T>
double dotProduct(const T* a, const T* b, std::int64_t count);
// Of two matrices, element by element; their rows are stride_* apart.
template <class T>
double dotProduct(const T* a, std::int64_t stride_a, const T* b, std::int64_t stride_b, std::int64_t rows,
                  std::int64_t columns);

}  // namespace torchext
