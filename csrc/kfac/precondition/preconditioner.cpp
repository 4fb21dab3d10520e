#include "kfac/precondition/preconditioner.h"

#include <algorithm>
#include <utility>

#include "kfac/precondition/tiled_product.h"

namespace torchext {
namespace {

using Kind = KfacLayerSpec::Kind;

}  // namespace

Preconditioner::Preconditioner(const std::vector<KfacLayerSpec>& layers, const at::TensorOptions& options,
                               Layout layout)
    : layers_(layers), parts_(std::move(layout.parts)), offsets_(layers.size(), 0), active_(layers.size(), false) {
  std::int64_t total = 0;
  int most = 1;
  places_.resize(layers.size());
  for (std::size_t layer = 0; layer < layers.size(); ++layer) {
    offsets_[layer] = total;
    total += layers[layer].elements();
    places_[layer].resize(static_cast<std::size_t>(parts_[layer]));
    most = std::max(most, parts_[layer]);
  }
  std::int64_t end = 0;
  const auto append = [&](int layer, int part) {
    places_[static_cast<std::size_t>(layer)][static_cast<std::size_t>(part)] = end;
    end += spec(layer).rows() * (column(layer, part + 1) - column(layer, part));
  };
  for (const int layer : layout.order) {
    if (parts(layer) > 1) {
      split_.push_back(layer);
    } else {
      append(layer, 0);
    }
  }
  for (int part = 0; part < most; ++part) {
    for (const int layer : split_) {
      append(layer, part);
    }
  }
  gradients_ = at::zeros({total}, options);
  preconditioned_ = at::zeros({total}, options);
}

bool Preconditioner::splits(const KfacLayerSpec& spec, InverseForm form) {
  return form == InverseForm::kInverse && spec.kind != Kind::kEmbedding && spec.groups == 1;
}

bool Preconditioner::usesTiles(const KfacLayerSpec& spec, InverseForm form) {
  return form == InverseForm::kInverse && spec.kind != Kind::kEmbedding &&
         TiledProduct::pays(spec.outputs(), spec.inputDim());
}

std::int64_t Preconditioner::column(int layer, int part) const { return spec(layer).width() * part / parts(layer); }

at::Tensor Preconditioner::slice(int layer) const {
  return preconditioned_.narrow(0, places_[static_cast<std::size_t>(layer)][0], spec(layer).elements());
}

at::Tensor Preconditioner::splitSlice(int part, int first, int last) const {
  const std::int64_t from = place(first, part);
  const std::int64_t columns = column(last, part + 1) - column(last, part);
  return preconditioned_.narrow(0, from, place(last, part) + spec(last).rows() * columns - from);
}

void Preconditioner::findActive() {
  for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
    active_[layer] = layers_[layer].weight.grad().defined();
  }
}

at::Tensor Preconditioner::biasGradient(int layer) const {
  const auto& bias = layers_[static_cast<std::size_t>(layer)].bias;
  return bias ? bias->grad() : at::Tensor();
}

}  // namespace torchext
