// Preconditioner in ATen, on any device: work is queued on the current stream, and only collect() waits for it.
#include <limits>

#include "kfac/linalg/reductions.h"
#include "kfac/precondition/preconditioner.h"

namespace torchext {
namespace {

using Kind = KfacLayerSpec::Kind;

class AtenPreconditioner final : public Preconditioner {
 public:
  using Base = Preconditioner;
  AtenPreconditioner(const std::vector<KfacLayerSpec>& layers, const at::TensorOptions& options, Layout layout)
      : Base(layers, options, std::move(layout)) {}

  bool collect(double scale, const std::vector<at::Tensor>& others, const std::vector<bool>& of_rows) override;
  void precondition(int layer, int part, const FactorInverse& inputs, const FactorInverse& outputs, InverseForm form,
                    double damping) override;
  std::int64_t write(const std::vector<double>& rates, std::optional<double> kl_clip) override;
  double clip() const override { return clip_.defined() ? clip_.item<double>() : 1; }

 private:
  // [rows, width]; [rows, columns] of a part.
  at::Tensor gradient(int layer) const {
    return gradients().narrow(0, offset(layer), spec(layer).elements()).view({spec(layer).rows(), spec(layer).width()});
  }
  at::Tensor direction(int layer, int part) const {
    const std::int64_t columns = column(layer, part + 1) - column(layer, part);
    return preconditioned()
        .narrow(0, place(layer, part), spec(layer).rows() * columns)
        .view({spec(layer).rows(), columns});
  }
  at::Tensor product(int layer) const;
  // Pairs of a parameter's gradient and its elements in [rows, width] of the layer.
  struct Pairs {
    std::vector<at::Tensor> own;
    std::vector<at::Tensor> ours;
  };
  void append(int layer, const at::Tensor& matrix, Pairs& pairs) const;

  at::Tensor clip_;  // one number on the device; undefined: 1
};

void AtenPreconditioner::append(int layer, const at::Tensor& matrix, Pairs& pairs) const {
  const KfacLayerSpec& of = spec(layer);
  const std::int64_t inputs = spec(layer).width() - (of.bias ? 1 : 0);
  pairs.own.push_back(of.weight.grad());
  pairs.ours.push_back(matrix.narrow(1, 0, inputs).view(of.weight.sizes()));
  if (const at::Tensor bias = biasGradient(layer); bias.defined()) {
    pairs.own.push_back(bias);
    pairs.ours.push_back(matrix.select(1, inputs));
  }
}

bool AtenPreconditioner::collect(double scale, const std::vector<at::Tensor>& others,
                                 const std::vector<bool>& /*of_rows*/) {
  findActive();
  Pairs pairs;
  for (int layer = 0; layer < count(); ++layer) {
    if (active(layer)) {
      append(layer, gradient(layer), pairs);
    } else {
      gradient(layer).zero_();
    }
    if (active(layer) && spec(layer).bias && !biasGradient(layer).defined()) {
      gradient(layer).select(1, spec(layer).width() - 1).zero_();
    }
  }
  if (!pairs.own.empty()) {
    at::_foreach_copy_(pairs.ours, pairs.own);
  }
  if (scale != 1) {
    gradients().mul_(scale);
  }
  // One answer for all that lies on this device, so that there is one wait for it.
  std::vector<at::Tensor> dense;
  bool elsewhere = true;
  for (const at::Tensor& other : others) {
    if (other.layout() == at::kStrided && other.device() == gradients().device() && other.is_floating_point() &&
        other.numel() > 0) {
      dense.push_back(other);
    } else {
      elsewhere = elsewhere && isFinite(other);
    }
  }
  at::Tensor finite = gradients().isfinite().all();
  if (!dense.empty()) {
    const auto largest = at::_foreach_norm(dense, std::numeric_limits<double>::infinity(), at::kDouble);
    finite = finite.logical_and(at::stack(largest).isfinite().all());
  }
  return finite.item<bool>() && elsewhere;
}

void AtenPreconditioner::precondition(int layer, int part, const FactorInverse& inputs, const FactorInverse& outputs,
                                      InverseForm form, double damping) {
  const KfacLayerSpec& of = spec(layer);
  const std::int64_t out = of.outputs();
  const std::int64_t in = of.inputDim();
  const std::int64_t begin = column(layer, part);
  const std::int64_t columns = column(layer, part + 1) - begin;
  const at::Tensor grad = gradient(layer);
  at::Tensor to = direction(layer, part);
  if (!active(layer) || !inputs.defined() || !outputs.defined()) {
    to.copy_(grad.narrow(1, begin, columns));
    return;
  }
  const at::Tensor& g = outputs.matrix;  // [groups, out, out]
  const at::Tensor& a = inputs.matrix;   // [groups, in, in]; of an embedding, which is stored as [tokens, width], [in]
  if (of.kind == Kind::kEmbedding) {
    const at::Tensor vectors = g.select(0, 0);
    const at::Tensor diagonal = a.unsqueeze(1);
    if (form == InverseForm::kInverse) {
      at::mm_out(to, grad, vectors);
      to.mul_(diagonal);
    } else {
      const at::Tensor rotated = at::mm(grad, vectors).div_(diagonal * outputs.values + damping);
      at::mm_out(to, rotated, vectors.t());
    }
    return;
  }
  const at::Tensor blocks = grad.view({of.groups, out, in});
  to = to.view({of.groups, out, columns});
  if (form == InverseForm::kInverse) {
    at::bmm_out(to, g, at::bmm(blocks, a.narrow(2, begin, columns)));
    return;
  }
  const at::Tensor rotated = at::bmm(at::bmm(g.transpose(1, 2), blocks), a);
  rotated.div_(outputs.values.unsqueeze(2) * inputs.values.unsqueeze(1) + damping);
  at::bmm_out(to, g, at::bmm(rotated, a.transpose(1, 2)));
}

at::Tensor AtenPreconditioner::product(int layer) const {
  at::Tensor sum;
  for (int part = 0; part < parts(layer); ++part) {
    const at::Tensor found = direction(layer, part);
    const at::Tensor of_part = (gradient(layer).narrow(1, column(layer, part), found.size(1)) * found).sum(at::kDouble);
    sum = sum.defined() ? sum + of_part : of_part;
  }
  return sum;
}

std::int64_t AtenPreconditioner::write(const std::vector<double>& rates, std::optional<double> kl_clip) {
  clip_ = at::Tensor();
  std::vector<at::Tensor> terms;
  for (int layer = 0; layer < count() && kl_clip; ++layer) {
    const double rate = rates[static_cast<std::size_t>(layer)];
    if (active(layer)) {
      terms.push_back(product(layer) * (rate * rate));
    }
  }
  if (!terms.empty()) {
    const at::Tensor product = at::stack(terms).sum().abs();
    const at::Tensor clip = (*kl_clip / product).sqrt().clamp_max(1);
    clip_ = at::where(product > 0, clip, at::ones_like(clip));
    preconditioned().mul_(clip_);
  }
  Pairs pairs;
  for (int layer = 0; layer < count(); ++layer) {
    if (!active(layer)) {
      continue;
    }
    std::vector<at::Tensor> of_parts;
    of_parts.reserve(static_cast<std::size_t>(parts(layer)));
    for (int part = 0; part < parts(layer); ++part) {
      of_parts.push_back(direction(layer, part));
    }
    append(layer, of_parts.size() == 1 ? of_parts.front() : at::cat(of_parts, 1), pairs);
  }
  if (!pairs.own.empty()) {
    at::_foreach_copy_(pairs.own, pairs.ours);
  }
  return 0;
}

}  // namespace

std::unique_ptr<Preconditioner> makeAtenPreconditioner(const std::vector<KfacLayerSpec>& layers,
                                                       const at::TensorOptions& options,
                                                       Preconditioner::Layout layout) {
  return std::make_unique<AtenPreconditioner>(layers, options, std::move(layout));
}

}  // namespace torchext
