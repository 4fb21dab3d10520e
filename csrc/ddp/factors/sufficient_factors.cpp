#include "ddp/factors/sufficient_factors.h"

#include <algorithm>
#include <optional>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include "c10d/transport/agreement.h"
#include "core/base/check.h"
#include "ddp/common/attach_agreement.h"
#include "ddp/factors/row_links.h"

namespace torchext {
namespace {

constexpr const char* kWho = "torchext.auto: rows of layers";
constexpr const char* kWait = "the exchange of layers' rows";

at::ScalarType rowType(const std::vector<FactorLayer>& layers) {
  const bool wide = std::any_of(layers.begin(), layers.end(),
                                [](const FactorLayer& layer) { return layer.weight.scalar_type() == at::kDouble; });
  return wide ? at::kDouble : at::kFloat;
}

std::vector<RowExchange::Matrix> matricesOf(const std::vector<FactorLayer>& layers) {
  std::vector<RowExchange::Matrix> matrices;
  for (const FactorLayer& layer : layers) {
    TORCH_CHECK_VALUE(layer.places > 0, kWho, ": layer ", layer.name, " has places for ", layer.places, " rows");
    matrices.push_back({.number = static_cast<int>(matrices.size()),
                        .inputs = layer.weight.size(1),
                        .outputs = layer.weight.size(0),
                        .places = layer.places});
  }
  return matrices;
}

AgreementFields fieldsOf(const std::vector<FactorLayer>& layers) {
  std::vector<at::Tensor> tensors;
  std::vector<std::string> names;
  std::vector<std::string> places;
  for (const FactorLayer& layer : layers) {
    tensors.push_back(layer.weight);
    names.push_back(layer.name + (layer.bias.defined() ? " with bias" : ""));
    places.push_back(c10::str(layer.places));
  }
  return {agreementOf("layers", tensors, names), {"rows", places}};
}

at::Tensor asRows(const at::Tensor& tensor, std::int64_t width, at::ScalarType type) {
  return tensor.detach().reshape({tensor.numel() / std::max<std::int64_t>(width, 1), width}).to(type);
}

bool inBackwardPass() { return torch::autograd::get_current_graph_task_id() >= 0; }

// Whether the pass under way is for certain tensors (torch.autograd.grad), and accumulates nothing elsewhere.
bool isForInputs() {
  const auto* inputs = torch::autograd::get_current_graph_task_exec_info();
  return inputs != nullptr && !inputs->empty();
}

}  // namespace

SufficientFactors::SufficientFactors(c10::intrusive_ptr<AttachableBackend> group, std::vector<FactorLayer> layers)
    : group_(std::move(group)) {
  TORCH_CHECK_VALUE(!layers.empty(), kWho, ": no layers");
  const auto matrices = matricesOf(layers);
  agree(agreementGroup(*group_), kWho, fieldsOf(layers), "all ranks must pass the same layers and rows");
  // One tag for each message, and there are no more messages than layers.
  const int tag = group_->nextChannel();
  for (std::size_t tags = AttachableBackend::kTagsPerChannel; tags < layers.size();
       tags += AttachableBackend::kTagsPerChannel) {
    group_->nextChannel();
  }
  std::optional<RowLinks> links;
  if (group_->getSize() > 1) {
    links = rowLinks(*group_, kWait);
  }
  rows_ = std::make_shared<RowExchange>(matrices, at::TensorOptions(rowType(layers)), std::move(links), tag, kWho,
                                        [this](const Message& message) { left_.push_back(message); });
  stats_.row_bytes = rows_->bytes();
  for (FactorLayer& layer : layers) {
    layers_.emplace_back().spec = std::move(layer);
  }
  shutdown_callback_ = group_->addShutdownCallback([this] {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (lock) {  // else a pass waits, which the end of the group ends
      rows_ = nullptr;
    }
  });
}

SufficientFactors::~SufficientFactors() {
  if (inForkedChild()) {
    return;
  }
  group_->removeShutdownCallback(shutdown_callback_);
  if (rows_ && rows_->underWay()) {
    group_->keep(rows_);  // whose messages are awaited: dropped, they would stop all that comes after them
  }
}

RowExchange& SufficientFactors::rows() {
  group_->health()->checkUsable(kWait);
  TORCH_CHECK(rows_, kWho, ": the process group has been destroyed; call remove() before");
  return *rows_;
}

// ---- A pass ----

void SufficientFactors::expect(bool averages) {
  const std::lock_guard lock(mutex_);
  if (inBackwardPass()) {
    return;  // a checkpoint runs the model once more
  }
  if (begun_) {
    const bool abandoned = averages_;
    begun_ = false;
    if (abandoned) {
      rows().abandon();
      settle(/*writes=*/false);
    }
    forgetCalls();
  }
  ending_ = false;
  averages_ = averages;
}

void SufficientFactors::forgetCalls() {
  for (Layer& layer : layers_) {
    layer.calls.clear();
    layer.called = layer.expected = 0;
  }
}

void SufficientFactors::countRows(std::size_t layer, std::int64_t rows) {
  if (!inBackwardPass()) {
    const std::lock_guard lock(mutex_);
    layers_[layer].expected += rows;
  }
}

void SufficientFactors::backwardBegins() {
  const std::lock_guard lock(mutex_);
  if (!isForInputs()) {
    begin();
  }
}

// Autograd runs what is queued at the end of the pass that queues it, and a reentrant checkpoint is a pass of its own
// inside. So the outer pass, which comes first, queues the end.
void SufficientFactors::begin() {
  if (begun_) {
    return;
  }
  begun_ = true;
  for (std::size_t number = 0; number < layers_.size(); ++number) {
    checkWritten(number);
  }
  if (!std::exchange(ending_, true) && inBackwardPass()) {
    torch::autograd::Engine::get_default_engine().queue_callback([self = shared_from_this()] { self->endPass(); });
  }
}

// Somebody may have dropped or changed what passes in no_sync() have left in .grad.
void SufficientFactors::checkWritten(std::size_t number) {
  Layer& layer = layers_[number];
  if (!layer.written.defined()) {
    return;
  }
  const at::Tensor& gradient = layer.spec.weight.grad();
  if (!gradient.defined()) {
    layer.written = at::Tensor();
    rows().forget(static_cast<int>(number));
  } else if (!gradient.is_same(layer.written) || gradient._version() != layer.version) {
    rows().overflow(static_cast<int>(number));
  }
}

void SufficientFactors::keep(std::size_t number, const at::Tensor& input, const at::Tensor& gradient) {
  const std::lock_guard lock(mutex_);
  begin();
  Layer& layer = layers_[number];
  const int matrix = static_cast<int>(number);
  TORCH_CHECK(!rows().left(matrix), kWho, ": layer ", layer.spec.name,
              " came once more in a backward pass that had sent its rows; use activation checkpointing with "
              "use_reentrant=False");
  const at::ScalarType type = rows().options().dtype().toScalarType();
  Call call{asRows(input, layer.spec.weight.size(1), type), asRows(gradient, layer.spec.weight.size(0), type)};
  rows().keep(matrix, call.input, call.gradient);
  layer.called += call.input.size(0);
  layer.calls.push_back(std::move(call));
  const auto& together = rows().together(matrix);
  if (averages_ && std::all_of(together.begin(), together.end(), [this](int other) { return complete(other); })) {
    rows().leave(matrix);
    ++stats_.early;
  }
}

// A layer without a call may be called yet.
bool SufficientFactors::complete(int layer) const {
  const Layer& own = layers_[core::index(layer)];
  return own.called > 0 && own.called == own.expected;
}

void SufficientFactors::endPass() {
  const std::lock_guard lock(mutex_);
  ending_ = false;
  if (!begun_) {
    return;
  }
  const at::NoGradGuard no_grad;
  if (averages_) {
    rows().leave();
    settle(/*writes=*/true);
  } else {
    endLocalPass();
  }
  begun_ = averages_ = false;
  forgetCalls();
}

// ---- Gradients ----

void SufficientFactors::write(Layer& layer, const at::Tensor& weight, const at::Tensor& bias) {
  const auto add = [&](const at::Tensor& parameter, const at::Tensor& gradient) {
    if (!parameter.defined() || !parameter.requires_grad()) {
      return;
    }
    at::Tensor& held = parameter.mutable_grad();
    if (held.defined()) {
      held.add_(gradient);
    } else {
      held = gradient.to(parameter.scalar_type());
    }
  };
  add(layer.spec.weight, weight);
  add(layer.spec.bias, bias);
}

SufficientFactors::Call SufficientFactors::allCalls(const Layer& layer) const {
  if (layer.calls.size() == 1) {
    return layer.calls.front();
  }
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> gradients;
  for (const Call& call : layer.calls) {
    inputs.push_back(call.input);
    gradients.push_back(call.gradient);
  }
  return {at::cat(inputs), at::cat(gradients)};
}

void SufficientFactors::endLocalPass() {
  for (std::size_t number = 0; number < layers_.size(); ++number) {
    Layer& layer = layers_[number];
    if (layer.calls.empty()) {
      continue;
    }
    if (!layer.written.defined() && layer.spec.weight.grad().defined()) {
      rows().overflow(static_cast<int>(number));  // what is there is no sum of rows
    }
    const Call all = allCalls(layer);
    write(layer, at::mm(all.gradient.t(), all.input), all.gradient.sum(0));
    layer.written = layer.spec.weight.grad();
    layer.version = layer.written.defined() ? layer.written._version() : 0;
  }
}

// The messages of this rank have left.
void SufficientFactors::settle(bool writes) {
  std::optional<int> abandoned;
  std::vector<std::size_t> by_reduction;
  for (const Message& message : left_) {
    message->wait();
    if (const auto by = message->abandonedBy()) {
      abandoned = by;
      continue;
    }
    for (const int matrix : message->matrices()) {
      if (message->tooMany(matrix)) {
        by_reduction.push_back(core::index(matrix));
      } else if (writes && !abandoned) {
        writeRows(core::index(matrix), message->rows(matrix));
      }
    }
  }
  if (!abandoned) {
    std::sort(by_reduction.begin(), by_reduction.end());
    for (const std::size_t number : by_reduction) {
      reduce(number, writes);
    }
  }
  endStep();
  if (writes && abandoned) {
    begun_ = averages_ = false;
    forgetCalls();
    C10_THROW_ERROR(DistBackendError, c10::str(kWho, ": the backward pass of rank ", *abandoned,
                                               " raised an error, so that this step has no gradients; leave it out, or "
                                               "end the job"));
  }
}

void SufficientFactors::writeRows(std::size_t number, const RowExchange::Rows& rows) {
  Layer& layer = layers_[number];
  if (!rows.inputs.defined()) {
    return;  // nobody has called it
  }
  const at::Tensor gradients = rows.gradients / group_->getSize();
  if (layer.written.defined()) {  // this rank's own rows are among all of them
    layer.spec.weight.mutable_grad() = at::Tensor();
    if (layer.spec.bias.defined()) {
      layer.spec.bias.mutable_grad() = at::Tensor();
    }
  }
  write(layer, at::mm(gradients.t(), rows.inputs), gradients.sum(0));
}

// Gradient and bias of all passes since the last that averaged; not what an earlier one had left in .grad.
void SufficientFactors::reduce(std::size_t number, bool writes) {
  Layer& layer = layers_[number];
  const FactorLayer& spec = layer.spec;
  const at::ScalarType type = rows().options().dtype().toScalarType();
  const std::int64_t outputs = spec.weight.size(0);
  const std::int64_t inputs = spec.weight.size(1);
  at::Tensor all = at::zeros({outputs, inputs + 1}, type);
  at::Tensor weight = all.narrow(1, 0, inputs);
  at::Tensor bias = all.select(1, inputs);
  if (!layer.calls.empty()) {
    const Call own = allCalls(layer);
    weight.addmm_(own.gradient.t(), own.input);
    bias.add_(own.gradient.sum(0));
  }
  const bool local = layer.written.defined();
  const auto take = [local](const at::Tensor& parameter, at::Tensor& sum) {
    if (local && parameter.defined() && parameter.grad().defined()) {
      sum.add_(parameter.grad());
    }
  };
  take(spec.weight, weight);
  take(spec.bias, bias);
  std::vector<at::Tensor> tensors{all};
  group_->allreduce(tensors, c10d::AllreduceOptions())->wait();
  ++stats_.reductions;
  if (!writes) {
    return;
  }
  if (local) {
    spec.weight.mutable_grad() = at::Tensor();
    if (spec.bias.defined()) {
      spec.bias.mutable_grad() = at::Tensor();
    }
  }
  all.div_(group_->getSize());
  write(layer, weight.contiguous(), bias.contiguous());
}

void SufficientFactors::endStep() {
  rows().next();
  left_.clear();
  for (Layer& layer : layers_) {
    layer.written = at::Tensor();
  }
  ++stats_.steps;
}

SufficientFactors::Stats SufficientFactors::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

}  // namespace torchext
