// Samples with a 1 more at their end, laid out for a product: free of torch and of CUDA.
//
// K-FAC's factor of a layer with a bias is that of its inputs with a 1 appended. The copy that has it has
// rows of a length that is a multiple of kAligned, filled up with zeros, so that every row begins at 16
// bytes; without that cuBLAS takes slower kernels.
#pragma once

#include <cstdint>

#include "kernels/triangle.h"

namespace torchext::padded_samples {

constexpr std::int64_t kAligned = 4;
TORCHEXT_HOST_DEVICE constexpr std::int64_t alignedTo(std::int64_t length) {
  return (length + kAligned - 1) / kAligned * kAligned;
}

// A matrix of any strides, its elements at row * row_stride + column * column_stride.
template <class T>
struct Strided {
  const T* data;
  std::int64_t rows;
  std::int64_t columns;
  std::int64_t row_stride;
  std::int64_t column_stride;
};

// Of [samples; 1] by column (ones_in_rows: by row) at a place of the larger matrix: the sample, the 1, or 0.
template <class T>
TORCHEXT_HOST_DEVICE T appended(const Strided<T>& samples, bool ones_in_rows, std::int64_t row, std::int64_t column) {
  if (row < samples.rows && column < samples.columns) {
    return samples.data[row * samples.row_stride + column * samples.column_stride];
  }
  const bool one =
      ones_in_rows ? row == samples.rows && column < samples.columns : column == samples.columns && row < samples.rows;
  return one ? T(1) : T(0);
}

}  // namespace torchext::padded_samples
