#include "kfac/precondition/early_directions.h"

#include <ATen/Context.h>

#include <algorithm>
#include <limits>

namespace torchext {
namespace {

// [rows, size] of a Linear's input or the gradient at its output, whatever was in front of the last dimension.
at::Tensor rowsOf(const at::Tensor& tensor, at::ScalarType type) {
  return sampleRows(tensor, type, /*reduce=*/false, /*mean=*/false).reshape({-1, tensor.size(-1)});
}

// Of a sum of products of that type, relative to the sum of their sizes; generous, as sums are made in any order.
double roundingOf(at::ScalarType type) {
  if (type == at::kDouble) {
    return 1e-12;
  }
  // What torch.set_float32_matmul_precision allows a product of floats to be rounded to.
  const bool rough = at::globalContext().float32MatmulPrecision() != at::Float32MatmulPrecision::HIGHEST ||
                     at::globalContext().allowTF32CuBLAS();
  return type == at::kFloat && !rough ? 2e-5 : 2e-2;
}

}  // namespace

EarlyDirections::EarlyDirections(const std::vector<KfacLayerSpec>& layers, const at::TensorOptions& options)
    : layers_(layers), options_(options), calls_(layers.size()), held_(layers.size()) {}

void EarlyDirections::keep(int layer, const at::Tensor& input, const at::Tensor& gradient, int pass) {
  Calls& calls = callsOf(layer, pass);
  const auto type = c10::typeMetaToScalarType(options_.dtype());
  calls.inputs.push_back(rowsOf(input, type));
  calls.gradients.push_back(rowsOf(gradient, type));
  calls.rounding = std::max({calls.rounding, roundingOf(gradient.scalar_type()), roundingOf(type)});
}

EarlyDirections::Calls& EarlyDirections::callsOf(int layer, int pass) {
  Calls& calls = calls_[static_cast<std::size_t>(layer)];
  if (calls.pass != pass) {
    calls = Calls{pass, {}, {}, 0};
  }
  return calls;
}

void EarlyDirections::join(Calls& calls) {
  if (calls.inputs.size() > 1) {
    calls.inputs = {at::cat(calls.inputs)};
    calls.gradients = {at::cat(calls.gradients)};
  }
}

bool EarlyDirections::trainsBias(int layer) const { return spec(layer).bias && spec(layer).bias->requires_grad(); }

// Gradients of several backward passes are summed in .grad, and here too; where .grad is gone those before it are.
void EarlyDirections::hold(at::Tensor Held::*which, int layer, const at::Tensor& gradient) {
  at::Tensor& held = held_[static_cast<std::size_t>(layer)].*which;
  const at::Tensor& parameter = which == &Held::weight ? spec(layer).weight : *spec(layer).bias;
  held = held.defined() && parameter.grad().defined() ? held + gradient : gradient;
}

at::Tensor EarlyDirections::signs(std::int64_t size) {
  if (!signs_.defined() || signs_.numel() < size) {
    // By a multiplicative hash: made where they are used, and without the script's random numbers.
    constexpr std::int64_t kHash = 2654435761;
    const at::Tensor bits = at::arange(size, options_.dtype(at::kLong)).mul_(kHash).bitwise_right_shift(15);
    signs_ = bits.bitwise_and(1).mul_(2).sub_(1).to(options_.dtype());
  }
  return signs_.narrow(0, 0, size);
}

void EarlyDirections::compare(int layer, const at::Tensor& found, const at::Tensor& expected, const at::Tensor& most,
                              at::Tensor& direction) {
  // Written so that what is not a number is no misuse: the step is left out for what it is.
  const at::Tensor differs = (found - expected).norm().gt(most);
  at::Tensor& misused = held_[static_cast<std::size_t>(layer)].misused;
  constexpr double kNotANumber = std::numeric_limits<double>::quiet_NaN();
  if (!differs.is_cpu()) {
    direction.masked_fill_(differs, kNotANumber);
    misused = misused.defined() ? misused.logical_or(differs) : differs;
  } else if (differs.item<bool>()) {
    direction.fill_(kNotANumber);
    misused = differs;
  }
}

at::Tensor EarlyDirections::ofWeight(int layer, const at::Tensor& gradient, const FactorInverse& inputs,
                                     const FactorInverse& outputs, const Preconditioner::Tiles& tiles, int pass) {
  hold(&Held::weight, layer, gradient);
  ++count_;
  if (!inputs.defined() || !outputs.defined()) {
    return gradient;
  }
  Calls& calls = callsOf(layer, pass);
  join(calls);
  const std::int64_t out = gradient.size(0);
  const std::int64_t in = gradient.size(1);
  const at::Tensor own = gradient.to(options_);
  const at::Tensor a = calls.inputs.empty() ? at::zeros({0, in}, options_) : calls.inputs.front();
  const at::Tensor g = calls.gradients.empty() ? at::zeros({0, out}, options_) : calls.gradients.front();
  const at::Tensor inverse_a = inputs.matrix.select(0, 0);
  const at::Tensor inverse_g = outputs.matrix.select(0, 0);
  const at::Tensor of_inputs = inverse_a.narrow(0, 0, in).narrow(1, 0, in);
  const at::Tensor of_one = trainsBias(layer) ? inverse_a.select(0, in).narrow(0, 0, in) : at::Tensor();
  at::Tensor direction;
  const bool few = a.size(0) * (out * out + in * in + out * in) < out * in * (out + in);
  if (tiles.direction != nullptr && a.size(0) > 0) {
    direction = at::empty({out, in}, options_);
    const TiledDirection::Result result{direction.mutable_data_ptr<float>(), nullptr, in};
    tiles.direction->prepare(outputs.matrix, inputs.matrix, /*begin=*/0, in);
    const bool bias = of_one.defined();
    if (few) {
      const at::Tensor transposed = g.t().contiguous();
      const at::Tensor ones = bias ? at::ones({a.size(0)}, options_) : at::Tensor();
      const at::Tensor left = at::empty({out, a.size(0)}, options_);
      const at::Tensor right = at::empty({a.size(0), in}, options_);
      tiles.direction->computeHalves({a.const_data_ptr<float>(), bias ? ones.const_data_ptr<float>() : nullptr,
                                      transposed.const_data_ptr<float>(), a.size(0), in},
                                     left.mutable_data_ptr<float>(), right.mutable_data_ptr<float>(), *tiles.work);
      TiledDirection::joinHalves({left.const_data_ptr<float>(), right.const_data_ptr<float>(), out, a.size(0), in},
                                 result, *tiles.work);
    } else {
      const at::Tensor dense = own.contiguous();
      const at::Tensor of_bias = bias ? g.sum(0) : at::Tensor();
      tiles.direction->compute({dense.const_data_ptr<float>(), bias ? of_bias.const_data_ptr<float>() : nullptr, in},
                               result, *tiles.work);
    }
  } else if (few) {
    const at::Tensor right = of_one.defined() ? at::addmm(of_one, a, of_inputs) : at::mm(a, of_inputs);
    direction = at::mm(at::mm(g, inverse_g).t(), right);
  } else {
    const at::Tensor right = of_one.defined() ? at::mm(own, of_inputs).addr_(g.sum(0), of_one) : at::mm(own, of_inputs);
    direction = at::mm(inverse_g, right);
  }
  const at::Tensor vector = signs(in);
  const at::Tensor most = at::linalg_vector_norm(a, 2, 1).dot(at::linalg_vector_norm(g, 2, 1)).mul_(calls.rounding);
  compare(layer, at::mv(own, vector), at::mv(g.t(), at::mv(a, vector)), most, direction);
  return direction.to(gradient.scalar_type());
}

at::Tensor EarlyDirections::ofBias(int layer, const at::Tensor& gradient, const FactorInverse& inputs,
                                   const FactorInverse& outputs, int pass) {
  hold(&Held::bias, layer, gradient);
  if (!inputs.defined() || !outputs.defined()) {
    return gradient;
  }
  Calls& calls = callsOf(layer, pass);
  join(calls);
  const std::int64_t in = spec(layer).inputs();
  const at::Tensor a = calls.inputs.empty() ? at::zeros({0, in}, options_) : calls.inputs.front();
  const at::Tensor g = calls.gradients.empty() ? at::zeros({0, gradient.numel()}, options_) : calls.gradients.front();
  // The last column of [dW db] A^-1, without dW, which may come later: g^T ([a 1] A^-1's last column).
  const at::Tensor last = inputs.matrix.select(0, 0).select(0, in);
  const at::Tensor of_rows = at::mv(a, last.narrow(0, 0, in)).add_(last.select(0, in));
  at::Tensor direction = at::mv(outputs.matrix.select(0, 0), at::mv(g.t(), of_rows));
  compare(layer, gradient.to(options_), g.sum(0), at::linalg_vector_norm(g, 2, 1).sum().mul_(calls.rounding),
          direction);
  return direction.to(gradient.scalar_type());
}

at::Tensor EarlyDirections::product(const std::vector<double>& rates) const {
  at::Tensor sum = at::zeros({}, options_.dtype(at::kDouble));
  const auto type = c10::typeMetaToScalarType(options_.dtype());
  for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
    const auto add = [&](const at::Tensor& parameter, const at::Tensor& held) {
      if (held.defined() && parameter.grad().defined()) {
        const at::Tensor direction = parameter.grad().to(type).reshape(-1);
        sum.add_(direction.dot(held.to(type).reshape(-1)), rates[layer] * rates[layer]);
      }
    };
    add(layers_[layer].weight, held_[layer].weight);
    if (layers_[layer].bias) {
      add(*layers_[layer].bias, held_[layer].bias);
    }
  }
  return sum;
}

int EarlyDirections::misused() const {
  for (std::size_t layer = 0; layer < held_.size(); ++layer) {
    if (held_[layer].misused.defined() && held_[layer].misused.item<bool>()) {
      return static_cast<int>(layer);
    }
  }
  return -1;
}

void EarlyDirections::forget() {
  std::fill(calls_.begin(), calls_.end(), Calls());
  std::fill(held_.begin(), held_.end(), Held());
}

std::size_t EarlyDirections::bytes() const {
  std::size_t bytes = signs_.defined() ? signs_.nbytes() : 0;
  for (const Held& held : held_) {
    bytes += (held.weight.defined() ? held.weight.nbytes() : 0) + (held.bias.defined() ? held.bias.nbytes() : 0);
  }
  return bytes;
}

}  // namespace torchext
