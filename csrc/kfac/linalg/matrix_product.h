// Products of raw row-major matrices on the CPU: torch's BLAS without a dispatch a call, and X^T X at a little over
// half the price of a product.
//
// torch's wheels export sgemm_ and dgemm_ of the BLAS inside, but no syrk: symmetricProduct computes the upper triangle
// in panels of GEMMs, which with p panels costs (p + 1) / 2p of the full product. Where the BLAS is not exported, or a
// size is beyond its 32-bit integers, products go through ATen. Thread-safe; GEMM uses torch's threads.
#pragma once

#include <cstdint>
#include <optional>

namespace torchext {

// Whether a b^T, b without gaps, is the product to ask for where there is a choice. MKL keeps to AVX2 on AMD's
// processors; oneDNN's product of a linear layer has twice its speed there if they have AVX-512. Elsewhere a b is a
// little faster than a b^T. Ranks whose processors differ here round differently.
bool prefersLinearProducts();
// For tests: that answer, on any processor; none: the processor's. Not while products are made.
void setPrefersLinearProducts(std::optional<bool> answer);

// c[m, n] = a[m, k] b[k, n] + beta c, rows stride_* apart. transpose_a: a is stored as [k, m]; transpose_b likewise.
template <class T>
void multiply(bool transpose_a, bool transpose_b, std::int64_t m, std::int64_t n, std::int64_t k, const T* a,
              std::int64_t stride_a, const T* b, std::int64_t stride_b, T beta, T* c, std::int64_t stride_c);

// The upper triangle of out[dim, dim] (rows `stride` apart; parts of the lower one are written over) = the sum of x x^T
// over `count` samples x, the rows of data, data_stride apart.
template <class T>
void symmetricProduct(const T* data, std::int64_t data_stride, std::int64_t dim, std::int64_t count, T* out,
                      std::int64_t stride);

}  // namespace torchext
