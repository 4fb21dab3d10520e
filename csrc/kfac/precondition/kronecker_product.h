// KroneckerProduct: the products that make K-FAC's direction of one group of a layer, or of a part of its columns, on
// the CPU.
//
// Over raw memory that the caller owns; both forms of the inverse. The bias' column goes by itself.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/scale.h"
#include "kfac/linalg/matrix_product.h"

namespace torchext {

template <class T>
struct KroneckerProduct {
  std::int64_t out = 0;
  std::int64_t in = 0;
  std::int64_t dim = 0;         // of A: in, and the bias
  std::int64_t begin = 0;       // of the part's columns
  std::int64_t of_weight = 0;   // of the part's columns, those of the weight
  std::int64_t count = 0;       // of the part's columns: one more where the bias' is among them
  const T* gradient = nullptr;  // [out, in]
  const T* bias = nullptr;      // [out]; null: none
  const T* of_outputs = nullptr;
  const T* of_inputs = nullptr;
  T* to = nullptr;       // [out, of_weight]
  T* to_bias = nullptr;  // [out]

  // G^-1 (dW A^-1). work: [out, count]. A^-1 is symmetric: its rows are its columns.
  void makeOfInverses(T* work) const {
    if (prefersLinearProducts()) {  // the same, transposed
      const T* columns = of_inputs + begin * dim;
      addBias(columns + in, dim, count, work);
      multiply(false, true, count, out, in, columns, dim, gradient, in, withBias(), work, out);
      makeOfTransposed(work);
      return;
    }
    const T* columns = of_inputs + begin;
    for (std::int64_t row = 0; row < out && bias != nullptr; ++row) {
      cpu::scaleInto(work + row * of_weight, columns + in * dim, static_cast<std::size_t>(of_weight), bias[row]);
    }
    multiply(false, false, out, of_weight, in, gradient, in, columns, dim, withBias(), work, of_weight);
    multiply(false, false, out, of_weight, out, of_outputs, out, work, of_weight, T(0), to, of_weight);
    if (of_weight < count) {  // by itself: one column more than a round number takes a product a tenth longer
      const T* last = of_inputs + in * dim;
      addBias(last + in, 1, 1, work);
      multiply(false, false, out, 1, in, gradient, in, last, 1, withBias(), work, 1);
      multiply(false, false, out, 1, out, of_outputs, out, work, 1, T(0), to_bias, 1);
    }
  }

  // U_G ((U_G^T dW U_A) / (g a^T + damping)) U_A^T. work: twice [out, dim].
  void makeOfEigenvectors(const T* of_g, const T* of_a, T damping, T* work) const {
    T* second = work + out * dim;
    addBias(of_inputs + in * dim, 1, dim, work);
    multiply(true, true, dim, out, in, of_inputs, dim, gradient, in, withBias(), work, out);
    multiply(false, false, dim, out, out, work, out, of_outputs, out, T(0), second, out);
    for (std::int64_t j = 0; j < dim; ++j) {
      for (std::int64_t i = 0; i < out; ++i) {
        second[j * out + i] /= of_g[i] * of_a[j] + damping;
      }
    }
    multiply(false, false, dim, out, dim, of_inputs, dim, second, out, T(0), work, out);
    makeOfTransposed(work);
  }

  void goOn() {  // to the next group
    bias += bias != nullptr ? out : 0;
    gradient += out * in;
    to += out * of_weight;
    to_bias += of_weight < count ? out : 0;
    of_outputs += out * out;
    of_inputs += dim * dim;
  }

 private:
  T withBias() const { return bias != nullptr ? T(1) : T(0); }
  // What the product of the matrix is then added to: an outer product with the bias' gradient.
  void addBias(const T* of_a, std::int64_t stride, std::int64_t rows, T* work) const {
    for (std::int64_t row = 0; row < rows && bias != nullptr; ++row) {
      cpu::scaleInto(work + row * out, bias, static_cast<std::size_t>(out), of_a[row * stride]);
    }
  }
  // The last product, of what is there as [count, out], the bias' row last.
  void makeOfTransposed(const T* work) const {
    multiply(false, true, out, of_weight, out, of_outputs, out, work, out, T(0), to, of_weight);
    if (of_weight < count) {
      multiply(false, true, out, 1, out, of_outputs, out, work + of_weight * out, out, T(0), to_bias, 1);
    }
  }
};

}  // namespace torchext
