#include "optim/kfac_layer.h"

#include <algorithm>

#include "optim/patches.h"

namespace torchext {
namespace {

using Kind = KfacLayerSpec::Kind;
using Three = PatchWindow::Three;

template <class T>
at::Tensor asType(const at::Tensor& tensor) {
  return tensor.to(c10::CppTypeToScalarType<T>::value).contiguous();
}

// The last `values.size()` of three dimensions; those before it are `fill`.
Three threeOf(at::IntArrayRef values, std::int64_t fill) {
  Three result{fill, fill, fill};
  std::copy(values.begin(), values.end(), result.end() - static_cast<std::ptrdiff_t>(values.size()));
  return result;
}

std::int64_t productOf(const Three& values) { return values[0] * values[1] * values[2]; }

// Of an input without a dimension of samples, or whose padding is not zeros: as given, before it is padded.
PatchWindow windowOf(const KfacLayerSpec& spec, const at::Tensor& input) {
  PatchWindow w;
  w.size = threeOf(input.sizes().slice(input.dim() - static_cast<std::int64_t>(spec.stride.size())), 1);
  w.kernel = threeOf(spec.weight.sizes().slice(2), 1);
  w.stride = threeOf(spec.stride, 1);
  w.dilation = threeOf(spec.dilation, 1);
  w.before = threeOf(spec.pad_before, 0);
  const Three after = threeOf(spec.pad_after, 0);
  for (std::size_t i = 0; i < 3; ++i) {
    w.out[i] = (w.size[i] + w.before[i] + after[i] - w.dilation[i] * (w.kernel[i] - 1) - 1) / w.stride[i] + 1;
  }
  return w;
}

template <class T>
SampleMatrix<T> patches(const KfacLayerSpec& spec, const at::Tensor& given, Scratch& scratch) {
  PatchWindow w = windowOf(spec, given);
  at::Tensor input =
      asType<T>(given.dim() == static_cast<std::int64_t>(spec.stride.size()) + 1 ? given.unsqueeze(0) : given);
  if (spec.padding_mode != "constant") {
    std::vector<std::int64_t> pads;  // last dimension first, as pad() wants them
    for (std::size_t i = spec.stride.size(); i-- > 0;) {
      pads.push_back(spec.pad_before[i]);
      pads.push_back(spec.pad_after[i]);
    }
    input = at::pad(input, pads, spec.padding_mode).contiguous();
    w.before = Three{0, 0, 0};
    w.size = threeOf(input.sizes().slice(2), 1);
  }
  const std::int64_t samples = input.size(0);
  const std::int64_t channels = input.size(1);
  const std::int64_t positions = productOf(w.out);
  const std::int64_t image = productOf(w.size);
  const std::int64_t places = productOf(w.kernel);
  const std::int64_t dim = spec.inputDim();
  const std::int64_t in_group = channels / spec.groups;
  SampleMatrix<T> matrix{input, nullptr, true, dim, samples * positions, samples};
  T* to = scratch.get<T>(spec.groups * dim * matrix.count);
  matrix.data = to;
  const T* from = input.const_data_ptr<T>();
  for (std::int64_t group = 0; group < spec.groups; ++group) {
    for (std::int64_t channel = group * in_group; channel < (group + 1) * in_group; ++channel) {
      for (std::int64_t place = 0; place < places; ++place, to += matrix.count) {
        const Three at{place / (w.kernel[1] * w.kernel[2]), place / w.kernel[2] % w.kernel[1], place % w.kernel[2]};
        for (std::int64_t sample = 0; sample < samples; ++sample) {
          copyShifted(from + (sample * channels + channel) * image, w, at, to + sample * positions);
        }
      }
    }
    if (spec.bias) {
      std::fill(to, to + matrix.count, T(1));
      to += matrix.count;
    }
  }
  return matrix;
}

template <class T>
SampleMatrix<T> rowsOf(const at::Tensor& tensor, bool reduce, bool mean) {
  const at::Tensor rows = sampleRows(tensor, c10::CppTypeToScalarType<T>::value, reduce, mean);
  const std::int64_t dim = rows.size(-1);
  return {rows, rows.const_data_ptr<T>(), false, dim, dim == 0 ? 0 : rows.numel() / dim, samplesOf(rows)};
}

}  // namespace

std::int64_t KfacLayerSpec::outputs() const {
  return kind == Kind::kEmbedding ? weight.size(1) : weight.size(0) / groups;
}

std::int64_t KfacLayerSpec::inputs() const {
  return kind == Kind::kEmbedding ? weight.size(0) : weight.numel() / weight.size(0);
}

void checkCall(const KfacLayerSpec& spec, const at::Tensor& input, const at::Tensor& output) {
  const auto is = [](const at::Tensor& tensor, std::int64_t dimension, std::int64_t size) {
    return tensor.dim() >= 1 && tensor.size(dimension) == size;
  };
  bool fits = false;
  if (spec.kind == Kind::kConvolution) {
    const auto spatial = static_cast<std::int64_t>(spec.stride.size());
    const auto channels = [&](const at::Tensor& images) { return images.size(images.dim() - spatial - 1); };
    fits = (input.dim() == spatial + 1 || input.dim() == spatial + 2) && output.dim() == input.dim() &&
           channels(input) == spec.weight.size(1) * spec.groups && channels(output) == spec.weight.size(0) &&
           (input.dim() == spatial + 1 || input.size(0) == output.size(0)) &&
           threeOf(output.sizes().slice(output.dim() - spatial), 1) == windowOf(spec, input).out;
  } else if (spec.kind == Kind::kEmbedding) {
    fits = is(output, -1, spec.weight.size(1)) && output.numel() == input.numel() * output.size(-1);
  } else {
    fits = is(input, -1, spec.weight.size(1)) && is(output, -1, spec.weight.size(0)) &&
           input.sizes().slice(0, static_cast<std::size_t>(input.dim() - 1)) ==
               output.sizes().slice(0, static_cast<std::size_t>(output.dim() - 1));
  }
  TORCH_CHECK_VALUE(fits, "torchext.optim: ", spec.name, " with a weight of ", spec.weight.sizes(), " was called with ",
                    input.sizes(), " and returned ", output.sizes(),
                    ", which such a layer does not: does its forward() pad or slice? Leave it to the plain gradient, "
                    "by its name in skip_layers");
}

at::Tensor sampleRows(const at::Tensor& tensor, at::ScalarType type, bool reduce, bool mean) {
  at::Tensor rows = tensor.to(type).contiguous();
  if (reduce && rows.dim() > 2) {
    rows = rows.flatten(1, -2);
    rows = mean ? rows.mean(1) : rows.sum(1);
  }
  return rows;
}

template <class T>
SampleMatrix<T> inputMatrix(const KfacLayerSpec& spec, const at::Tensor& input, Scratch& scratch) {
  return spec.kind == Kind::kConvolution ? patches<T>(spec, input, scratch)
                                         : rowsOf<T>(input, spec.reduce_sequence, /*mean=*/true);
}

template <class T>
SampleMatrix<T> gradientMatrix(const KfacLayerSpec& spec, const at::Tensor& gradient, Scratch& scratch) {
  if (spec.kind != Kind::kConvolution) {
    return rowsOf<T>(gradient, spec.reduce_sequence, /*mean=*/false);
  }
  const bool batched = gradient.dim() == static_cast<std::int64_t>(spec.stride.size()) + 2;
  const at::Tensor images = asType<T>(batched ? gradient : gradient.unsqueeze(0));
  const std::int64_t samples = images.size(0);
  const std::int64_t channels = images.size(1);
  const std::int64_t positions = samples == 0 ? 0 : images.numel() / (samples * channels);
  SampleMatrix<T> matrix{images, nullptr, true, spec.outputs(), samples * positions, samples};
  T* to = scratch.get<T>(channels * matrix.count);
  matrix.data = to;
  const T* from = images.const_data_ptr<T>();
  for (std::int64_t channel = 0; channel < channels; ++channel) {
    for (std::int64_t sample = 0; sample < samples; ++sample) {
      to = std::copy_n(from + (sample * channels + channel) * positions, positions, to);
    }
  }
  return matrix;
}

template SampleMatrix<float> inputMatrix<float>(const KfacLayerSpec&, const at::Tensor&, Scratch&);
template SampleMatrix<double> inputMatrix<double>(const KfacLayerSpec&, const at::Tensor&, Scratch&);
template SampleMatrix<float> gradientMatrix<float>(const KfacLayerSpec&, const at::Tensor&, Scratch&);
template SampleMatrix<double> gradientMatrix<double>(const KfacLayerSpec&, const at::Tensor&, Scratch&);

}  // namespace torchext
