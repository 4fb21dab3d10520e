#include "ddp/factors/sufficient_factors.h"

#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include "c10d/threads/interruptible_wait.h"
#include "core/base/check.h"
#include "ddp/common/attach_agreement.h"
#include "ddp/factors/row_links.h"

namespace torchext {
namespace {

constexpr const char* kWho = "torchext.auto: rows of layers";
constexpr const char* kWait = "the exchange of layers' rows";

bool inBackwardPass() { return torch::autograd::get_current_graph_task_id() >= 0; }

// Whether the pass under way is for certain tensors (torch.autograd.grad), and accumulates nothing elsewhere.
bool isForInputs() {
  const auto* inputs = torch::autograd::get_current_graph_task_exec_info();
  return inputs != nullptr && !inputs->empty();
}

}  // namespace

SufficientFactors::SufficientFactors(c10::intrusive_ptr<AttachableBackend> group, std::vector<FactorLayer> layers)
    : group_(std::move(group)) {
  const at::TensorOptions options(rowTypeOf(layers));
  std::vector<RowExchange::Matrix> matrices = matricesOf(kWho, layers);
  agree(agreementGroup(*group_), kWho, fieldsOf(layers), "all ranks must pass the same layers and rows");
  const int tag = rowTags(*group_, layers.size());
  waits_ = std::make_shared<RowWaits>(
      std::make_unique<RowExchange>(std::move(matrices), options, rowLinks(*group_, kWait), tag, kWho,
                                    [this](const Message& message) { left_.push_back(message); }));
  stats_.row_bytes = waits_->rows().bytes();
  layers_.reserve(layers.size());
  for (FactorLayer& layer : layers) {
    layers_.emplace_back().spec = std::move(layer);
  }
  shutdown_callback_ = group_->addShutdownCallback([this] {
    const Lock lock = mutex_.look();
    letGo(std::exchange(waits_, nullptr));
  });
}

SufficientFactors::~SufficientFactors() {
  if (inForkedChild()) {
    return;
  }
  group_->removeShutdownCallback(shutdown_callback_);
  letGo(waits_);
}

void SufficientFactors::letGo(const std::shared_ptr<RowWaits>& waits) {
  if (waits && waits->busy()) {
    group_->keep(waits);
  }
}

RowExchange& SufficientFactors::rows() {
  group_->health()->checkUsable(kWait);
  TORCH_CHECK(waits_, kWho, ": the process group has been destroyed; call remove() before");
  return waits_->rows();
}

// A signal's handler may run in a wait of this very thread.
SufficientFactors::Lock SufficientFactors::enter() {
  return mutex_.enter(
      "torchext.auto: the model was called by a signal's handler while its backward pass waits for the rows of other "
      "ranks");
}

// ---- A pass ----

void SufficientFactors::expect(bool averages) {
  Lock lock = enter();
  if (inBackwardPass()) {
    return;  // a checkpoint runs the model once more
  }
  if (begun_) {
    if (averages_) {
      if (!settling_) {
        rows().abandon();
      }
      settle(lock, /*writes=*/false);
    }
    forgetPass();
  }
  ending_ = false;
  averages_ = averages;
}

void SufficientFactors::forgetPass() {
  begun_ = averages_ = false;
  for (Layer& layer : layers_) {
    layer.calls.clear();
    layer.called = layer.expected = 0;
  }
}

void SufficientFactors::countRows(std::size_t layer, std::int64_t rows) {
  if (!inBackwardPass()) {
    const Lock lock = enter();
    layers_[layer].expected += rows;
  }
}

void SufficientFactors::backwardBegins() {
  const Lock lock = enter();
  if (!isForInputs()) {
    begin();
  }
}

// Autograd runs what is queued at the end of the pass that queues it, and a reentrant checkpoint is a pass of its own
// inside. So the outer pass, which comes first, queues the end.
void SufficientFactors::begin() {
  rows();  // a failure first
  TORCH_CHECK(!settling_, kWho,
              ": the backward pass before was interrupted while it waited for other ranks; call the model again first");
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
  const Lock lock = enter();
  begin();
  Layer& layer = layers_[number];
  const int matrix = static_cast<int>(number);
  TORCH_CHECK(!rows().left(matrix), kWho, ": layer ", layer.spec.name,
              " came once more in a backward pass that had sent its rows; use activation checkpointing with "
              "use_reentrant=False");
  FactorRows call = rowsOfCall(layer.spec, input, gradient, rows().options().dtype().toScalarType());
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
  Lock lock = enter();
  ending_ = false;
  if (!begun_) {
    return;
  }
  const at::NoGradGuard no_grad;
  if (averages_) {
    rows().leave();
    settle(lock, /*writes=*/true);
  } else {
    endLocalPass();
  }
  forgetPass();
}

// ---- Gradients ----

void SufficientFactors::endLocalPass() {
  for (std::size_t number = 0; number < layers_.size(); ++number) {
    Layer& layer = layers_[number];
    if (layer.calls.empty()) {
      continue;
    }
    if (!layer.written.defined() && layer.spec.weight.grad().defined()) {
      rows().overflow(static_cast<int>(number));  // what is there is no sum of rows
    }
    addToGrad(layer.spec, gradientsOf(layer.spec, joined(layer.calls)));
    layer.written = layer.spec.weight.grad();
    layer.version = layer.written.defined() ? layer.written._version() : 0;
  }
}

// All messages of this rank have left. Goes on where a signal has ended it, for what has begun is not begun again.
void SufficientFactors::settle(Lock& lock, bool writes) {
  rows();  // there is a group
  const std::shared_ptr<RowWaits> waits = waits_;
  if (!settling_) {
    settling_ = Settling{};
  }
  Settling& settling = *settling_;
  while (settling.arrivals.size() < left_.size()) {
    const Message& next = left_[settling.arrivals.size()];
    settling.arrivals.push_back(waits->begin([message = next] { message->wait(); }));
  }
  const auto await = [&](const std::shared_future<void>& done) {
    mutex_.without(lock, [&] {
      waitInterruptibly(done);
      done.get();
    });
  };
  for (; settling.taken < left_.size(); ++settling.taken) {
    await(settling.arrivals[settling.taken]);
    take(*left_[settling.taken], writes);
  }
  while (!settling.abandoned_by && !settling.reductions.empty()) {
    reduce(lock, settling.reductions.extract(settling.reductions.begin()).value(), writes);
  }
  if (!settling.sent.valid()) {
    settling.sent = waits->begin([&exchange = waits->rows()] { exchange.next(); });
  }
  await(settling.sent);
  const std::optional<int> abandoned_by = settling.abandoned_by;
  settling_.reset();
  left_.clear();
  for (Layer& layer : layers_) {
    layer.written = at::Tensor();
  }
  ++stats_.steps;
  if (writes && abandoned_by) {
    forgetPass();
    C10_THROW_ERROR(DistBackendError, c10::str(kWho, ": the backward pass of rank ", *abandoned_by,
                                               " raised an error, so that this step has no gradients; leave it out, or "
                                               "end the job"));
  }
}

// What came of the layers in a message: gradients, or the word that they go by all-reduce.
void SufficientFactors::take(const RowExchange::Message& message, bool writes) {
  if (const auto by = message.abandonedBy()) {
    settling_->abandoned_by = by;
    return;
  }
  for (const int matrix : message.matrices()) {
    const Layer& layer = layers_[core::index(matrix)];
    if (message.tooMany(matrix)) {
      settling_->reductions.insert(core::index(matrix));
      continue;
    }
    const RowExchange::Rows rows = message.rows(matrix);
    if (!writes || settling_->abandoned_by || !rows.inputs.defined()) {
      continue;  // undefined: nobody has called it
    }
    if (layer.written.defined()) {  // this rank's own rows are among all of them
      dropGrad(layer.spec);
    }
    addToGrad(layer.spec, gradientsOf(layer.spec, {rows.inputs, rows.gradients / group_->getSize()}));
  }
}

// Gradient and bias of all passes since the last that averaged; not what an earlier one had left in .grad.
void SufficientFactors::reduce(Lock& lock, std::size_t number, bool writes) {
  const Layer& layer = layers_[number];
  const FactorLayer& spec = layer.spec;
  auto [all, sum] = noGradients(spec, rows().options());
  const bool local = layer.written.defined();
  if (!layer.calls.empty()) {
    sum.add(gradientsOf(spec, joined(layer.calls)));
  }
  if (local) {
    sum.add(gradOf(spec));
  }
  std::vector<at::Tensor> tensors{all};
  mutex_.without(lock, [&] { group_->allreduce(tensors, c10d::AllreduceOptions())->wait(); });
  ++stats_.reductions;
  if (!writes) {
    return;
  }
  if (local) {
    dropGrad(spec);
  }
  all.div_(group_->getSize());
  addToGrad(spec, sum.clone());
}

}  // namespace torchext
