#include "kfac/factors/patch_correlation.h"

#include <algorithm>
#include <vector>

#include "kfac/linalg/matrix_product.h"
#include "kfac/linalg/patches.h"

namespace torchext {
namespace {

struct Range {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t size() const { return std::max<std::int64_t>(end - begin, 0); }
};

// One spatial dimension: place k sees element t + k - before at position t.
struct Axis {
  std::int64_t size = 0;
  std::int64_t kernel = 0;
  std::int64_t before = 0;
  std::int64_t positions = 0;

  Range all() const { return {before - kernel + 1, size + before}; }  // positions that touch the image
  // Places that touch the image at position t.
  Range places(std::int64_t t) const {
    return {std::max<std::int64_t>(before - t, 0), std::min(size + before - t, kernel)};
  }
  // Elements that place k sees at the output's positions.
  Range seen(std::int64_t k) const {
    return {std::max<std::int64_t>(k - before, 0), std::min(positions + k - before, size)};
  }
};

struct Geometry {
  std::int64_t samples = 0;
  std::int64_t channels = 0;
  Axis y;
  Axis x;
};

// Positions outside the output, and the places of the kernel that touch the image there.
struct Line {
  Range y;
  Range x;
  Range places_y;
  Range places_x;
  std::int64_t rows(const Geometry& g) const { return g.channels * places_y.size() * places_x.size(); }
  std::int64_t columns(const Geometry& g) const { return g.samples * y.size() * x.size(); }
};

Geometry geometryOf(const KfacLayerSpec& spec, const at::Tensor& input) {
  const bool padded = spec.padding_mode != "constant";  // those pads become part of the image
  const auto axis = [&](std::size_t i) {
    const std::int64_t size = input.size(-2 + static_cast<std::int64_t>(i));
    const std::int64_t kernel = spec.weight.size(2 + static_cast<std::int64_t>(i));
    const std::int64_t with_pads = size + spec.pad_before[i] + spec.pad_after[i];
    return Axis{padded ? with_pads : size, kernel, padded ? 0 : spec.pad_before[i], with_pads - kernel + 1};
  };
  return {input.dim() == 4 ? input.size(0) : 1, input.size(-3), axis(0), axis(1)};
}

// The frame: whole rows above and below the output, and beside it columns as high as it is.
std::vector<Line> frameOf(const Geometry& g) {
  std::vector<Line> lines;
  const auto outside = [](const Axis& axis, const auto& add) {
    for (std::int64_t t = axis.all().begin; t < axis.all().end; ++t) {
      if (t < 0 || t >= axis.positions) {
        add(t);
      }
    }
  };
  outside(g.y, [&](std::int64_t t) { lines.push_back({{t, t + 1}, g.x.all(), g.y.places(t), {0, g.x.kernel}}); });
  outside(g.x, [&](std::int64_t t) {
    lines.push_back({{0, g.y.positions}, {t, t + 1}, {0, g.y.kernel}, g.x.places(t)});
  });
  return lines;
}

// out -= the products of the patches on a line. images: [samples, channels, ...] with kernel - 1 zeros on all sides.
template <class T>
void subtractLine(const Geometry& g, const Line& line, const T* images, Scratch& scratch, T* out, std::int64_t dim) {
  const std::int64_t rows = line.rows(g);
  const std::int64_t columns = line.columns(g);
  T* patches = scratch.get<T>(rows * (columns + rows));
  T* product = patches + rows * columns;
  const std::int64_t width = g.x.size + 2 * (g.x.kernel - 1);
  const std::int64_t image = (g.y.size + 2 * (g.y.kernel - 1)) * width;
  const Patches of_line{{{g.samples, 1, line.y.size(), line.x.size()}, {g.channels * image, 0, width, 1}},
                        {{g.channels, 1, line.places_y.size(), line.places_x.size()}, {image, 0, width, 1}}};
  // What the first of these places sees at the line's first position.
  const T* first = images + (line.y.begin + line.places_y.begin + g.y.kernel - 1 - g.y.before) * width + line.x.begin +
                   line.places_x.begin + g.x.kernel - 1 - g.x.before;
  of_line.copy(first, patches);
  std::vector<std::int64_t> place_of;
  for (std::int64_t channel = 0; channel < g.channels; ++channel) {
    for (std::int64_t y = line.places_y.begin; y < line.places_y.end; ++y) {
      for (std::int64_t x = line.places_x.begin; x < line.places_x.end; ++x) {
        place_of.push_back((channel * g.y.kernel + y) * g.x.kernel + x);
      }
    }
  }
  symmetricProduct(patches, rows, rows, columns, product, rows);
  for (std::int64_t i = 0; i < rows; ++i) {
    T* row = out + place_of[static_cast<std::size_t>(i)] * dim;
    for (std::int64_t j = i; j < rows; ++j) {
      row[place_of[static_cast<std::size_t>(j)]] -= product[i * rows + j];
    }
  }
}

// Writes the products of what two channels' places see: with t counted over all positions that touch the image, they
// depend on how far the places are apart. products: [c, c', dy, dx + kernel - 1], dy from 0 on; the others are the
// mirror of (c', c). kWidth: the kernel's, 0 for one that is not known here.
template <std::int64_t kWidth, class T>
void writePairs(const Geometry& g, const T* products, T* out, std::int64_t dim) {
  const std::int64_t width = kWidth > 0 ? kWidth : g.x.kernel;
  const std::int64_t height = g.y.kernel;
  const std::int64_t shifts = 2 * width - 1;
  const std::int64_t half = height * shifts;
  std::vector<T> shifted(static_cast<std::size_t>((2 * height - 1) * shifts));  // of a pair, [dy + height - 1, ...]
  T* const level = shifted.data() + (height - 1) * shifts;                      // dy = 0
  for (std::int64_t c = 0; c < g.channels; ++c) {
    for (std::int64_t other = c; other < g.channels; ++other) {
      const T* mirror = products + (other * g.channels + c) * half;
      std::copy_n(products + (c * g.channels + other) * half, half, level);
      for (std::int64_t i = shifts; i < half; ++i) {
        level[shifts - 1 - i] = mirror[i];
      }
      T* row = out + c * height * width * dim + other * height * width;
      for (std::int64_t y = 0; y < height; ++y) {
        for (std::int64_t x = 0; x < width; ++x, row += dim) {
          const T* from = level - y * shifts + width - 1 - x;
          T* to = row;
          for (std::int64_t other_y = 0; other_y < height; ++other_y, from += shifts, to += width) {
            for (std::int64_t other_x = 0; other_x < width; ++other_x) {
              to[other_x] = from[other_x];
            }
          }
        }
      }
    }
  }
}

// The last column: sums of what each place sees.
template <class T>
void addOnes(const Geometry& g, const T* images, Scratch& scratch, T* out, std::int64_t dim) {
  const std::int64_t area = g.y.size * g.x.size;
  T* sums = scratch.get<T>(g.channels * area + g.y.size);  // over samples
  T* line_sums = sums + g.channels * area;
  std::fill(sums, sums + g.channels * area, T(0));
  for (std::int64_t sample = 0; sample < g.samples; ++sample) {
    const T* image = images + sample * g.channels * area;
    for (std::int64_t i = 0; i < g.channels * area; ++i) {
      sums[i] += image[i];
    }
  }
  for (std::int64_t channel = 0; channel < g.channels; ++channel) {
    for (std::int64_t kx = 0; kx < g.x.kernel; ++kx) {
      const Range columns = g.x.seen(kx);
      for (std::int64_t y = 0; y < g.y.size; ++y) {
        line_sums[y] = 0;
        for (std::int64_t x = columns.begin; x < columns.end; ++x) {
          line_sums[y] += sums[channel * area + y * g.x.size + x];
        }
      }
      for (std::int64_t ky = 0; ky < g.y.kernel; ++ky) {
        T sum = 0;
        for (std::int64_t y = g.y.seen(ky).begin; y < g.y.seen(ky).end; ++y) {
          sum += line_sums[y];
        }
        out[((channel * g.y.kernel + ky) * g.x.kernel + kx) * dim + dim - 1] = sum;
      }
    }
  }
  out[dim * dim - 1] = static_cast<T>(g.samples * g.y.positions * g.x.positions);
}

}  // namespace

bool patchCorrelationPays(const KfacLayerSpec& spec, const at::Tensor& input) {
  const auto ones = [](const std::vector<std::int64_t>& values) {
    return std::all_of(values.begin(), values.end(), [](std::int64_t value) { return value == 1; });
  };
  // Below 8 channels oneDNN has no blocked kernel, and patches are small.
  constexpr std::int64_t kFewestChannels = 8;
  if (spec.kind != KfacLayerSpec::Kind::kConvolution || spec.stride.size() != 2 || spec.groups != 1 ||
      !ones(spec.stride) || !ones(spec.dilation) || input.size(-3) < kFewestChannels || input.numel() == 0) {
    return false;
  }
  const Geometry g = geometryOf(spec, input);
  const auto square = [](std::int64_t value) { return static_cast<double>(value) * static_cast<double>(value); };
  const auto area = static_cast<double>(g.samples * g.y.size * g.x.size);
  double flops = 2 * square(g.channels) * static_cast<double>(g.y.kernel * (2 * g.x.kernel - 1)) * area;
  for (const Line& line : frameOf(g)) {
    flops += square(line.rows(g)) * static_cast<double>(line.columns(g));
  }
  const double patches =
      square(g.channels * g.y.kernel * g.x.kernel) * static_cast<double>(g.samples * g.y.positions * g.x.positions);
  constexpr double kClearly = 0.7;
  return flops < kClearly * patches;
}

template <class T>
void correlatePatches(const KfacLayerSpec& spec, const at::Tensor& input, Scratch& scratch, T* out) {
  const auto type = c10::CppTypeToScalarType<T>::value;
  const at::Tensor images = spec.padding_mode == "constant"
                                ? (input.dim() == 4 ? input : input.unsqueeze(0)).to(type).contiguous()
                                : paddedImages(spec, input, type);
  const Geometry g = geometryOf(spec, input);
  const std::int64_t above = g.y.kernel - 1;
  const std::int64_t beside = g.x.kernel - 1;
  const std::int64_t dim = spec.inputDim();
  // The sum over s of x_c(s) x_c'(s + (dy, dx)), dy from 0 on.
  const at::Tensor below = above > 0 ? at::constant_pad_nd(images, {0, 0, 0, above}) : images;
  const at::Tensor kernel = at::empty({g.channels, g.channels, g.y.kernel, 2 * beside + 1}, images.options());
  const at::Tensor products =
      std::get<1>(at::convolution_backward(images, below, kernel, at::OptionalIntArrayRef(), {1, 1}, {0, beside},
                                           {1, 1}, false, {0, 0}, 1, {false, true, false}))
          .contiguous();
  const T* from = products.template const_data_ptr<T>();
  if (g.x.kernel == 3) {
    writePairs<3>(g, from, out, dim);
  } else {
    writePairs<0>(g, from, out, dim);
  }
  const at::Tensor around = at::constant_pad_nd(images, {beside, beside, above, above}).contiguous();
  for (const Line& line : frameOf(g)) {
    subtractLine(g, line, around.template const_data_ptr<T>(), scratch, out, dim);
  }
  if (spec.bias) {
    addOnes(g, images.template const_data_ptr<T>(), scratch, out, dim);
  }
}

template void correlatePatches<float>(const KfacLayerSpec&, const at::Tensor&, Scratch&, float*);
template void correlatePatches<double>(const KfacLayerSpec&, const at::Tensor&, Scratch&, double*);

}  // namespace torchext
