// Symmetric matrices as packed upper triangles: what K-FAC keeps, averages and sends of a factor.
//
// Row i of the triangle holds the columns i..d-1, rows one after the other, so that packing copies runs of memory and
// no table of indices is needed. Full matrices are row-major with `stride` elements from row to row; only their upper
// triangle is read. Plain loops over one buffer that the caller owns; one thread.
#pragma once

#include <algorithm>
#include <cstddef>

namespace torchext::core {

// Elements of the packed triangle of a d x d matrix.
constexpr std::size_t packedSize(std::size_t d) { return d * (d + 1) / 2; }
// Where row `i` begins, that is the place of the diagonal element (i, i).
constexpr std::size_t packedRow(std::size_t i, std::size_t d) { return i * d - i * (i - 1) / 2; }

template <class T>
void packTriangle(const T* full, std::size_t stride, std::size_t d, T* packed) {
  for (std::size_t i = 0; i < d; ++i) {
    packed = std::copy(full + i * stride + i, full + i * stride + d, packed);
  }
}

// packed += scale * the triangle of full.
template <class T>
void addTriangle(const T* full, std::size_t stride, std::size_t d, T scale, T* packed) {
  for (std::size_t i = 0; i < d; ++i) {
    const T* row = full + i * stride + i;
    const std::size_t count = d - i;
    for (std::size_t j = 0; j < count; ++j) {
      packed[j] += scale * row[j];
    }
    packed += count;
  }
}

// The upper triangle of full into its lower one. In blocks, because a column of a large matrix lies in as many cache
// lines as it has rows.
template <class T>
void mirrorTriangle(T* full, std::size_t stride, std::size_t d) {
  constexpr std::size_t kBlock = 32;
  for (std::size_t top = 0; top < d; top += kBlock) {
    const std::size_t bottom = std::min(top + kBlock, d);
    for (std::size_t left = top; left < d; left += kBlock) {
      const std::size_t right = std::min(left + kBlock, d);
      for (std::size_t j = left; j < right; ++j) {
        for (std::size_t i = top; i < std::min(bottom, j); ++i) {
          full[j * stride + i] = full[i * stride + j];
        }
      }
    }
  }
}

// Writes both halves of full.
template <class T>
void unpackTriangle(const T* packed, std::size_t d, T* full, std::size_t stride) {
  for (std::size_t i = 0; i < d; ++i) {
    std::copy(packed, packed + (d - i), full + i * stride + i);
    packed += d - i;
  }
  mirrorTriangle(full, stride, d);
}

// Sum of the diagonal. Finite if and only if the whole matrix is, where the matrix is X^T X: no element is larger than
// the geometric mean of its two diagonal elements, which are not negative, and a NaN in X is on the diagonal too.
template <class T>
T packedTrace(const T* packed, std::size_t d) {
  T sum = 0;
  for (std::size_t i = 0; i < d; ++i) {
    sum += *packed;
    packed += d - i;
  }
  return sum;
}

}  // namespace torchext::core
