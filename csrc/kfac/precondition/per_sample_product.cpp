#include "kfac/precondition/per_sample_product.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kfac/linalg/matrix_product.h"
#include "kfac/linalg/reductions.h"

namespace torchext {
namespace {

// In units of the type's precision and of the sum of the sizes of rows' products: what roundings come to is an eighth
// of it or less, while a penalty of 1e-6 of such a sum is seen.
constexpr double kRoundings = 8;

// +1 and -1 by a multiplicative hash: made where they are used, and without the script's random numbers.
template <class T>
std::vector<T> signs(std::int64_t count) {
  constexpr std::uint64_t kHash = 0x9E3779B97F4A7C15ULL;
  std::vector<T> result(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < result.size(); ++i) {
    result[i] = ((i + 1) * kHash) >> 63U ? T(1) : T(-1);
  }
  return result;
}

template <class T>
void addComparison(const at::Tensor& inputs, const at::Tensor& gradients, PerSampleProduct& made) {
  const std::int64_t in = inputs.size(1);
  const std::int64_t out = gradients.size(1);
  const std::vector<T> vector = signs<T>(in);
  made.times_signs.assign(static_cast<std::size_t>(out), 0);
  made.ones.assign(static_cast<std::size_t>(out), 0);
  for (std::int64_t row = 0; row < inputs.size(0); ++row) {
    const T* a = inputs.const_data_ptr<T>() + row * in;
    const T* g = gradients.const_data_ptr<T>() + row * out;
    const double along = dotProduct(a, vector.data(), in);
    const double size = std::sqrt(dotProduct(g, g, out));
    made.weight_rounding += size * std::sqrt(dotProduct(a, a, in));
    made.bias_rounding += size;
    for (std::size_t i = 0; i < made.ones.size(); ++i) {
      const auto value = static_cast<double>(g[i]);
      made.times_signs[i] += value * along;
      made.ones[i] += value;
    }
  }
  constexpr double kRounding = kRoundings * std::numeric_limits<T>::epsilon();
  made.weight_rounding *= kRounding;
  made.bias_rounding *= kRounding;
}

// <L R, sum g (a 1)^T> = the sum over pairs of rows of (L_r, g_s) (R_r, (a_s 1)).
template <class T>
double productOf(const PerSampleProduct& made, const at::Tensor& inputs, const at::Tensor& gradients) {
  const std::int64_t rows = inputs.size(0);
  const std::int64_t in = inputs.size(1);
  const std::int64_t dim = made.right.size(1);
  const at::Tensor of_outputs = at::empty({rows, rows}, inputs.options());
  const at::Tensor of_inputs = at::empty({rows, rows}, inputs.options());
  T* to = of_inputs.mutable_data_ptr<T>();
  const T* right = made.right.const_data_ptr<T>();
  multiply(false, false, rows, rows, gradients.size(1), gradients.const_data_ptr<T>(), gradients.size(1),
           made.left.const_data_ptr<T>(), rows, T(0), of_outputs.mutable_data_ptr<T>(), rows);
  for (std::int64_t s = 0; s < rows && made.bias; ++s) {
    for (std::int64_t r = 0; r < rows; ++r) {
      to[s * rows + r] = right[r * dim + in];
    }
  }
  multiply(false, true, rows, rows, in, inputs.const_data_ptr<T>(), in, right, dim, made.bias ? T(1) : T(0), to, rows);
  return dotProduct(of_outputs.const_data_ptr<T>(), of_inputs.const_data_ptr<T>(), rows * rows);
}

double sumOfSquares(const std::vector<double>& vector) {
  double sum = 0;
  for (const double value : vector) {
    sum += value * value;
  }
  return sum;
}

}  // namespace

template <class T>
PerSampleProduct makePerSampleProduct(const at::Tensor& inputs, const at::Tensor& gradients, bool bias,
                                      const at::Tensor& inverse_of_inputs, const at::Tensor& inverse_of_outputs,
                                      const TiledProduct* tiled, TiledProduct::Work& work) {
  const std::int64_t rows = inputs.size(0);
  const std::int64_t in = inputs.size(1);
  const std::int64_t out = gradients.size(1);
  const std::int64_t dim = inverse_of_inputs.size(0);
  PerSampleProduct made;
  made.inputs = in;
  made.bias = bias;
  made.left = at::empty({out, rows}, inputs.options());
  made.right = at::empty({rows, dim}, inputs.options());
  const at::Tensor transposed = gradients.t().contiguous();
  T* left = made.left.mutable_data_ptr<T>();
  T* right = made.right.mutable_data_ptr<T>();
  bool on_tiles = false;
  if constexpr (std::is_same_v<T, float>) {
    if (tiled != nullptr) {
      const at::Tensor ones = bias ? at::ones({rows}, inputs.options()) : at::Tensor();
      tiled->computeHalves({inputs.const_data_ptr<float>(), bias ? ones.const_data_ptr<float>() : nullptr,
                            transposed.const_data_ptr<float>(), rows, in},
                           left, right, work);
      on_tiles = true;
    }
  }
  if (!on_tiles) {
    const T* of_inputs = inverse_of_inputs.const_data_ptr<T>();
    for (std::int64_t row = 0; row < rows && bias; ++row) {
      std::copy_n(of_inputs + in * dim, dim, right + row * dim);
    }
    multiply(false, false, rows, dim, in, inputs.const_data_ptr<T>(), in, of_inputs, dim, bias ? T(1) : T(0), right,
             dim);
    multiply(false, false, out, rows, out, inverse_of_outputs.const_data_ptr<T>(), out, transposed.const_data_ptr<T>(),
             rows, T(0), left, rows);
  }
  made.product = productOf<T>(made, inputs, gradients);
  addComparison<T>(inputs, gradients, made);
  return made;
}

template <class T>
std::vector<double> timesSigns(const T* weight, std::int64_t out, std::int64_t in) {
  const std::vector<T> vector = signs<T>(in);
  std::vector<double> result(static_cast<std::size_t>(out));
  for (double& value : result) {
    value = dotProduct(weight, vector.data(), in);
    weight += in;
  }
  return result;
}

template <class T>
std::optional<double> factorOf(const PerSampleProduct& made, const std::vector<double>& times_signs, const T* bias,
                               double expected) {
  // Written so that what is not a number does not fit.
  const auto fits = [&](double factor) {
    double rest = 0;
    double rest_of_bias = 0;
    for (std::size_t i = 0; i < times_signs.size(); ++i) {
      const double difference = times_signs[i] - factor * made.times_signs[i];
      const double of_bias = bias == nullptr ? 0 : static_cast<double>(bias[i]) - factor * made.ones[i];
      rest += difference * difference;
      rest_of_bias += of_bias * of_bias;
    }
    return std::sqrt(rest) <= std::abs(factor) * made.weight_rounding &&
           std::sqrt(rest_of_bias) <= std::abs(factor) * made.bias_rounding;
  };
  if (made.bias != (bias != nullptr)) {
    return std::nullopt;
  }
  if (fits(expected)) {
    return expected;
  }
  double common = 0;
  for (std::size_t i = 0; i < times_signs.size(); ++i) {
    common += times_signs[i] * made.times_signs[i];
  }
  const double squares = sumOfSquares(made.times_signs);
  const double factor = squares > 0 ? common / squares : 0;
  return factor != 0 && fits(factor) ? std::optional(factor) : std::nullopt;
}

template <class T>
void writePerSampleProduct(const PerSampleProduct& made, double factor, bool tiles, T* weight, T* bias,
                           TiledProduct::Work& work) {
  const std::int64_t out = made.left.size(0);
  const std::int64_t rows = made.left.size(1);
  const std::int64_t dim = made.right.size(1);
  const at::Tensor scaled = made.left.mul(factor);
  const T* left = scaled.const_data_ptr<T>();
  const T* right = made.right.const_data_ptr<T>();
  const std::int64_t in = made.inputs;
  if constexpr (std::is_same_v<T, float>) {
    if (tiles) {
      TiledProduct::joinHalves({left, right, out, rows, dim}, {weight, bias, in}, work);
      return;
    }
  }
  multiply(false, false, out, in, rows, left, rows, right, dim, T(0), weight, in);
  if (bias != nullptr) {
    multiply(false, false, out, 1, rows, left, rows, right + in, dim, T(0), bias, 1);
  }
}

template PerSampleProduct makePerSampleProduct<float>(const at::Tensor&, const at::Tensor&, bool, const at::Tensor&,
                                                      const at::Tensor&, const TiledProduct*, TiledProduct::Work&);
template PerSampleProduct makePerSampleProduct<double>(const at::Tensor&, const at::Tensor&, bool, const at::Tensor&,
                                                       const at::Tensor&, const TiledProduct*, TiledProduct::Work&);
template std::vector<double> timesSigns<float>(const float*, std::int64_t, std::int64_t);
template std::vector<double> timesSigns<double>(const double*, std::int64_t, std::int64_t);
template std::optional<double> factorOf<float>(const PerSampleProduct&, const std::vector<double>&, const float*,
                                               double);
template std::optional<double> factorOf<double>(const PerSampleProduct&, const std::vector<double>&, const double*,
                                                double);
template void writePerSampleProduct<float>(const PerSampleProduct&, double, bool, float*, float*, TiledProduct::Work&);
template void writePerSampleProduct<double>(const PerSampleProduct&, double, bool, double*, double*,
                                            TiledProduct::Work&);

}  // namespace torchext
