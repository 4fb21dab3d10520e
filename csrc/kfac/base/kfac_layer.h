// KfacLayerSpec is one layer as K-FAC sees it: which matrix its inputs and output gradients form.
//
// A layer's weight W is [out, in] (a convolution's kernel flattened), with `groups` blocks along out; a bias is a
// column more, by an input that is always 1. Every block has two factors,
//   A = sum a a^T over samples and positions, a of length in (+ 1)      G = sum g g^T, g of length out / groups
// and the sums are made from a matrix whose rows are the a or the g. This file makes those matrices: for Linear it is
// the tensor itself where it is contiguous, for convolutions the patches.
//
// Errors of shapes that no such layer can have had are c10::Error; nothing here is collective. One thread at a time a
// Scratch.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/ATen.h>

namespace torchext {

struct KfacLayerSpec {
  enum class Kind { kLinear, kConvolution, kEmbedding };

  std::string name;  // in the model; in errors and in state
  Kind kind = Kind::kLinear;
  at::Tensor weight;               // the parameter itself: its .grad() is preconditioned
  std::optional<at::Tensor> bias;  // only if it is trained
  // Convolutions, one a spatial dimension; padding before and after it.
  std::vector<std::int64_t> stride;
  std::vector<std::int64_t> dilation;
  std::vector<std::int64_t> pad_before;
  std::vector<std::int64_t> pad_after;
  std::string padding_mode = "constant";  // constant (zeros), reflect, replicate, circular
  std::int64_t groups = 1;
  // Linear on sequences [N, T, in]: one sample a position (expand), or inputs averaged and gradients summed (reduce).
  bool reduce_sequence = false;
  std::int64_t padding_idx = -1;  // Embedding; -1: none

  std::int64_t outputs() const;  // of a group
  std::int64_t inputs() const;   // of a group, without the 1
  std::int64_t inputDim() const { return inputs() + (bias ? 1 : 0); }
  bool diagonalInput() const { return kind == Kind::kEmbedding; }
  // Of the gradients of weight and bias as one matrix: of an embedding [tokens, width], else [all outputs, inputs + 1].
  std::int64_t rows() const { return kind == Kind::kEmbedding ? inputs() : groups * outputs(); }
  std::int64_t width() const { return kind == Kind::kEmbedding ? outputs() : inputDim(); }
  std::int64_t elements() const { return rows() * width(); }
};

// Memory that grows and stays: a fresh buffer of this size a step would be page faults.
class Scratch {
 public:
  template <class T>
  T* get(std::int64_t elements) {
    const auto bytes = static_cast<std::size_t>(elements) * sizeof(T);
    if (memory_.nbytes() < bytes) {
      memory_ = at::empty({static_cast<std::int64_t>(bytes)}, at::kByte);
    }
    return static_cast<T*>(memory_.mutable_data_ptr());
  }
  std::size_t bytes() const { return memory_.nbytes(); }

 private:
  at::Tensor memory_ = at::empty({0}, at::kByte);
};

// Samples, [groups, count, dim], row after row. They lack the 1 of a bias.
template <class T>
struct SampleMatrix {
  at::Tensor keeps;  // what owns `data`, where it is not the scratch memory
  const T* data = nullptr;
  std::int64_t dim = 0;
  std::int64_t count = 0;  // samples times positions
  std::int64_t samples = 0;
};

// What a layer's weight was multiplied with, or the gradient at what came of it, as a dense tensor: of one of any other
// layout, all its elements; of a nested one [rows, dim], all its parts after each other (with reduce_sequence each part
// averaged or summed). Throws std::invalid_argument, as ValueError in Python, where a layer of this kind has no such.
at::Tensor denseSamples(const KfacLayerSpec& spec, const at::Tensor& tensor, bool is_input);

// Of what such a layer makes of an input. Throws std::invalid_argument, as ValueError in Python, where it takes no such
// input, or makes another number of elements of it than `sizes`: a subclass may pad or slice in its forward(), and what
// is read here would be of other sizes. sizes: nothing where they are not known.
std::vector<std::int64_t> outputSizes(const KfacLayerSpec& spec, const at::Tensor& input,
                                      const std::optional<std::vector<std::int64_t>>& sizes);

// [N, ..., dim] dense and in the type asked for; of a sequence with `reduce` [N, dim], its positions averaged (mean) or
// summed. Any device.
at::Tensor sampleRows(const at::Tensor& tensor, at::ScalarType type, bool reduce, bool mean);
// A convolution's input [N, channels, ...] with its padding around it, dense and in the type asked for. Any device.
at::Tensor paddedImages(const KfacLayerSpec& spec, const at::Tensor& input, at::ScalarType type);
// N; a single sample has no such dimension.
inline std::int64_t samplesOf(const at::Tensor& rows) { return rows.dim() > 1 ? rows.size(0) : 1; }

// Of the layer's input [N, ...].
template <class T>
SampleMatrix<T> inputMatrix(const KfacLayerSpec& spec, const at::Tensor& input, Scratch& scratch);
// Of the gradient at its output.
template <class T>
SampleMatrix<T> gradientMatrix(const KfacLayerSpec& spec, const at::Tensor& gradient, Scratch& scratch);

}  // namespace torchext
