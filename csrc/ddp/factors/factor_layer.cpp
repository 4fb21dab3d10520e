#include "ddp/factors/factor_layer.h"

#include <algorithm>

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include "ddp/common/attach_agreement.h"

namespace torchext {
namespace {

constexpr std::int64_t kIndexBytes = sizeof(std::int64_t);

bool isEmbedding(const FactorLayer& layer) { return layer.kind == FactorLayer::Kind::kEmbedding; }

std::int64_t outputsOf(const FactorLayer& layer) { return layer.weight.size(isEmbedding(layer) ? 1 : 0); }

at::Tensor asRows(const at::Tensor& tensor, std::int64_t width) {
  return tensor.reshape({tensor.numel() / std::max<std::int64_t>(width, 1), width});
}

std::int64_t numbersOfIndex(at::ScalarType type) {
  return kIndexBytes / static_cast<std::int64_t>(c10::elementSize(type));
}

at::Tensor bitsOf(const at::Tensor& indices, at::ScalarType type) {
  const at::Tensor whole = indices.detach().reshape({indices.numel()}).to(at::kLong).contiguous();
  return whole.view(type).reshape({indices.numel(), numbersOfIndex(type)});
}

// A copy, for what is read as integers must begin at a multiple of their size.
at::Tensor indicesOf(const at::Tensor& bits) { return bits.clone().reshape({bits.numel()}).view(at::kLong); }

void addTo(const at::Tensor& parameter, const at::Tensor& gradient) {
  if (!parameter.defined() || !parameter.requires_grad()) {
    return;
  }
  at::Tensor& held = parameter.mutable_grad();
  if (held.defined()) {
    held.add_(gradient);
  } else {
    held = gradient.to(parameter.scalar_type());
  }
}

std::string described(const FactorLayer& layer) {
  std::string text = layer.name;
  if (isEmbedding(layer)) {
    text += c10::str(" (embedding, padding ", layer.padding, ")");
  }
  return text + (layer.bias.defined() ? " with bias" : "");
}

}  // namespace

void FactorGradients::add(const FactorGradients& others) {
  if (others.weight.defined()) {
    weight.add_(others.weight);
  }
  if (others.bias.defined()) {
    bias.add_(others.bias);
  }
}

FactorGradients FactorGradients::clone() const {
  return {weight.clone(), bias.defined() ? bias.clone() : at::Tensor()};
}

at::ScalarType rowTypeOf(const std::vector<FactorLayer>& layers) {
  const bool wide = std::any_of(layers.begin(), layers.end(),
                                [](const FactorLayer& layer) { return layer.weight.scalar_type() == at::kDouble; });
  return wide ? at::kDouble : at::kFloat;
}

std::vector<RowExchange::Matrix> matricesOf(const char* who, const std::vector<FactorLayer>& layers) {
  TORCH_CHECK_VALUE(!layers.empty(), who, ": no layers");
  const at::ScalarType type = rowTypeOf(layers);
  std::vector<RowExchange::Matrix> matrices;
  matrices.reserve(layers.size());
  for (const FactorLayer& layer : layers) {
    TORCH_CHECK_VALUE(layer.places > 0, who, ": layer ", layer.name, " has places for ", layer.places, " rows");
    matrices.push_back({.number = static_cast<int>(matrices.size()),
                        .inputs = isEmbedding(layer) ? numbersOfIndex(type) : layer.weight.size(1),
                        .outputs = outputsOf(layer),
                        .places = layer.places});
  }
  return matrices;
}

AgreementFields fieldsOf(const std::vector<FactorLayer>& layers) {
  std::vector<at::Tensor> tensors;
  std::vector<std::string> names;
  std::vector<std::string> places;
  tensors.reserve(layers.size());
  names.reserve(layers.size());
  places.reserve(layers.size());
  for (const FactorLayer& layer : layers) {
    tensors.push_back(layer.weight);
    names.push_back(described(layer));
    places.push_back(c10::str(layer.places));
  }
  return {agreementOf("layers", tensors, names), {"rows", places}};
}

FactorRows rowsOfCall(const FactorLayer& layer, const at::Tensor& input, const at::Tensor& gradient,
                      at::ScalarType type) {
  return {isEmbedding(layer) ? bitsOf(input, type) : asRows(input.detach(), layer.weight.size(1)).to(type),
          asRows(gradient.detach(), outputsOf(layer)).to(type)};
}

FactorRows joined(const std::vector<FactorRows>& parts) {
  if (parts.size() == 1) {
    return parts.front();
  }
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> gradients;
  inputs.reserve(parts.size());
  gradients.reserve(parts.size());
  for (const FactorRows& part : parts) {
    inputs.push_back(part.input);
    gradients.push_back(part.gradient);
  }
  return {at::cat(inputs), at::cat(gradients)};
}

FactorGradients gradientsOf(const FactorLayer& layer, const FactorRows& rows) {
  if (isEmbedding(layer)) {
    return {at::embedding_dense_backward(rows.gradient, indicesOf(rows.input), layer.weight.size(0), layer.padding,
                                         /*scale_grad_by_freq=*/false),
            at::Tensor()};
  }
  return {at::mm(rows.gradient.t(), rows.input), layer.bias.defined() ? rows.gradient.sum(0) : at::Tensor()};
}

std::pair<at::Tensor, FactorGradients> noGradients(const FactorLayer& layer, const at::TensorOptions& options) {
  const std::int64_t weights = layer.weight.numel();
  const std::int64_t biases = layer.bias.defined() ? layer.bias.numel() : 0;
  const at::Tensor all = at::zeros({weights + biases}, options);
  return {all,
          {all.narrow(0, 0, weights).view(layer.weight.sizes()),
           layer.bias.defined() ? all.narrow(0, weights, biases) : at::Tensor()}};
}

FactorGradients gradOf(const FactorLayer& layer) {
  return {layer.weight.grad(), layer.bias.defined() ? layer.bias.grad() : at::Tensor()};
}

void addToGrad(const FactorLayer& layer, const FactorGradients& gradients) {
  addTo(layer.weight, gradients.weight);
  addTo(layer.bias, gradients.bias);
}

void dropGrad(const FactorLayer& layer) {
  layer.weight.mutable_grad() = at::Tensor();
  if (layer.bias.defined()) {
    layer.bias.mutable_grad() = at::Tensor();
  }
}

}  // namespace torchext
