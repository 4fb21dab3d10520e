#include "kfac/base/kfac_layer.h"

#include <algorithm>

#include "kfac/linalg/patches.h"

namespace torchext {
namespace {

using Kind = KfacLayerSpec::Kind;
using Three = std::array<std::int64_t, 3>;

// One, two or three spatial dimensions, counted as three: those in front are of size 1.
struct Window {
  Three kernel{1, 1, 1};    // places
  Three stride{1, 1, 1};    // elements of the image from position to position
  Three dilation{1, 1, 1};  // from place to place
  Three out{1, 1, 1};       // positions
};

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

Three imageOf(const KfacLayerSpec& spec, const at::Tensor& input) {
  return threeOf(input.sizes().slice(input.dim() - static_cast<std::int64_t>(spec.stride.size())), 1);
}

// Of an input before it is padded.
Window windowOf(const KfacLayerSpec& spec, const at::Tensor& input) {
  Window w;
  w.kernel = threeOf(spec.weight.sizes().slice(2), 1);
  w.stride = threeOf(spec.stride, 1);
  w.dilation = threeOf(spec.dilation, 1);
  const Three size = imageOf(spec, input);
  const Three before = threeOf(spec.pad_before, 0);
  const Three after = threeOf(spec.pad_after, 0);
  for (std::size_t i = 0; i < 3; ++i) {
    w.out[i] = (size[i] + before[i] + after[i] - w.dilation[i] * (w.kernel[i] - 1) - 1) / w.stride[i] + 1;
  }
  return w;
}

template <class T>
SampleMatrix<T> patches(const KfacLayerSpec& spec, const at::Tensor& given, Scratch& scratch) {
  const Window w = windowOf(spec, given);
  const at::Tensor input = paddedImages(spec, given, c10::CppTypeToScalarType<T>::value);
  const std::int64_t samples = input.size(0);
  const std::int64_t channels = input.size(1);
  const std::int64_t in_group = channels / spec.groups;
  const Three size = imageOf(spec, input);
  const std::int64_t image = productOf(size);
  const Three apart{size[1] * size[2], size[2], 1};  // elements of memory from one to the next
  Patches::Axes positions{{samples, w.out[0], w.out[1], w.out[2]}, {channels * image}};
  Patches::Axes places{{in_group, w.kernel[0], w.kernel[1], w.kernel[2]}, {image}};
  for (std::size_t i = 0; i < 3; ++i) {
    positions.step[i + 1] = w.stride[i] * apart[i];
    places.step[i + 1] = w.dilation[i] * apart[i];
  }
  const Patches of_group{positions, places};
  SampleMatrix<T> matrix{input, nullptr, places.total(), positions.total(), samples};
  T* to = scratch.get<T>(spec.groups * matrix.dim * matrix.count);
  matrix.data = to;
  const T* from = input.const_data_ptr<T>();
  for (std::int64_t group = 0; group < spec.groups; ++group, to += matrix.dim * matrix.count) {
    of_group.copy(from + group * in_group * image, to);
  }
  return matrix;
}

template <class T>
SampleMatrix<T> rowsOf(const at::Tensor& tensor, bool reduce, bool mean) {
  const at::Tensor rows = sampleRows(tensor, c10::CppTypeToScalarType<T>::value, reduce, mean);
  const std::int64_t dim = rows.size(-1);
  return {rows, rows.const_data_ptr<T>(), dim, dim == 0 ? 0 : rows.numel() / dim, samplesOf(rows)};
}

}  // namespace

std::int64_t KfacLayerSpec::outputs() const {
  return kind == Kind::kEmbedding ? weight.size(1) : weight.size(0) / groups;
}

std::int64_t KfacLayerSpec::inputs() const {
  return kind == Kind::kEmbedding ? weight.size(0) : weight.numel() / weight.size(0);
}

at::Tensor denseSamples(const KfacLayerSpec& spec, const at::Tensor& tensor, bool is_input) {
  if (!tensor.is_nested()) {
    return tensor.layout() == at::kStrided ? tensor : tensor.to_dense();
  }
  TORCH_CHECK_VALUE(spec.kind == Kind::kLinear, "torchext.optim: ", spec.name,
                    " was called with a nested tensor, of which K-FAC takes those of Linear layers; leave it to the "
                    "plain gradient, by its name in skip_layers");
  std::vector<at::Tensor> parts;
  for (const at::Tensor& part : tensor.unbind()) {
    const at::Tensor rows = part.reshape({-1, part.size(-1)});
    parts.push_back(!spec.reduce_sequence ? rows : is_input ? rows.mean(0, /*keepdim=*/true) : rows.sum(0, true));
  }
  return parts.empty() ? at::empty({0, is_input ? spec.inputs() : spec.outputs()}, tensor.options()) : at::cat(parts);
}

std::vector<std::int64_t> outputSizes(const KfacLayerSpec& spec, const at::Tensor& input,
                                      const std::optional<std::vector<std::int64_t>>& sizes) {
  std::optional<std::vector<std::int64_t>> made;
  const std::int64_t dims = input.dim();
  if (spec.kind == Kind::kConvolution) {
    const auto spatial = static_cast<std::int64_t>(spec.stride.size());
    if ((dims == spatial + 1 || dims == spatial + 2) &&
        input.size(dims - spatial - 1) == spec.weight.size(1) * spec.groups) {
      const Three out = windowOf(spec, input).out;
      made.emplace(input.sizes().begin(), input.sizes().end());
      (*made)[static_cast<std::size_t>(dims - spatial - 1)] = spec.weight.size(0);
      std::copy(out.end() - spatial, out.end(), made->end() - spatial);
    }
  } else if (spec.kind == Kind::kEmbedding) {
    made.emplace(input.sizes().begin(), input.sizes().end());
    made->push_back(spec.weight.size(1));
  } else if (dims >= 1 && input.size(-1) == spec.weight.size(1)) {
    made.emplace(input.sizes().begin(), input.sizes().end());
    made->back() = spec.weight.size(0);
  }
  const bool fits = made && (!sizes || c10::multiply_integers(*made) == c10::multiply_integers(*sizes)) &&
                    std::all_of(made->begin(), made->end(), [](std::int64_t size) { return size >= 0; });
  TORCH_CHECK_VALUE(
      fits, "torchext.optim: ", spec.name, " with a weight of ", spec.weight.sizes(), " was called with ",
      input.sizes(), sizes ? c10::str(" and made ", at::IntArrayRef(*sizes), " of it") : "",
      ", which such a layer does not: does its forward() pad or slice? Leave it to the plain gradient, by its name in "
      "skip_layers");
  return *made;
}

at::Tensor sampleRows(const at::Tensor& tensor, at::ScalarType type, bool reduce, bool mean) {
  at::Tensor rows = tensor.to(type).contiguous();
  if (reduce && rows.dim() > 2) {
    rows = rows.flatten(1, -2);
    rows = mean ? rows.mean(1) : rows.sum(1);
  }
  return rows;
}

at::Tensor paddedImages(const KfacLayerSpec& spec, const at::Tensor& input, at::ScalarType type) {
  const auto spatial = static_cast<std::int64_t>(spec.stride.size());
  const at::Tensor images = (input.dim() == spatial + 1 ? input.unsqueeze(0) : input).to(type);
  std::vector<std::int64_t> pads;  // last dimension first, as pad() wants them
  bool any = false;
  for (std::size_t i = spec.stride.size(); i-- > 0;) {
    pads.insert(pads.end(), {spec.pad_before[i], spec.pad_after[i]});
    any = any || spec.pad_before[i] > 0 || spec.pad_after[i] > 0;
  }
  return (any ? at::pad(images, pads, spec.padding_mode) : images).contiguous();
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
  const std::int64_t image = samples == 0 ? 0 : images.numel() / (samples * channels);
  // A patch of one element of each channel.
  const Patches of_group{{{samples, 1, 1, image}, {channels * image, 0, 0, 1}}, {{spec.outputs(), 1, 1, 1}, {image}}};
  SampleMatrix<T> matrix{images, nullptr, spec.outputs(), samples * image, samples};
  T* to = scratch.get<T>(channels * matrix.count);
  matrix.data = to;
  const T* from = images.const_data_ptr<T>();
  for (std::int64_t group = 0; group < spec.groups; ++group, to += matrix.dim * matrix.count) {
    of_group.copy(from + group * spec.outputs() * image, to);
  }
  return matrix;
}

template SampleMatrix<float> inputMatrix<float>(const KfacLayerSpec&, const at::Tensor&, Scratch&);
template SampleMatrix<double> inputMatrix<double>(const KfacLayerSpec&, const at::Tensor&, Scratch&);
template SampleMatrix<float> gradientMatrix<float>(const KfacLayerSpec&, const at::Tensor&, Scratch&);
template SampleMatrix<double> gradientMatrix<double>(const KfacLayerSpec&, const at::Tensor&, Scratch&);

}  // namespace torchext
