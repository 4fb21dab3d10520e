#include "optim/row_directions.h"

#include <utility>

namespace torchext {

RowDirections::RowDirections(std::vector<BatchRows::Layer> layers, const at::TensorOptions& options,
                             KfacExchange* exchange, int tag)
    : rows_(std::move(layers), options, exchange, tag,
            [this](const std::shared_ptr<BatchRows::Message>& message) { follow(message); }) {
  if (rows_.travels()) {
    thread_.emplace("tx_rows");
  }
}

RowDirection RowDirections::make(int layer, const BatchRows::Message& message, const Inverses& inverses,
                                 TiledDirection::Work& work) {
  const BatchRows::Rows rows = message.rows(layer);
  if (!rows.inputs.defined() || !inverses.of_inputs.defined() || !inverses.of_outputs.defined()) {
    return {};
  }
  const at::Tensor of_inputs = inverses.of_inputs.matrix.select(0, 0);
  const at::Tensor of_outputs = inverses.of_outputs.matrix.select(0, 0);
  if (inverses.tiled) {
    inverses.tiled->prepare(inverses.of_outputs.matrix, inverses.of_inputs.matrix, /*begin=*/0, of_inputs.size(0));
  }
  const auto make_as = rows.inputs.scalar_type() == at::kDouble ? &makeRowDirection<double> : &makeRowDirection<float>;
  return make_as(rows.inputs, rows.gradients, inverses.bias, of_inputs, of_outputs, inverses.tiled.get(), work);
}

void RowDirections::follow(const std::shared_ptr<BatchRows::Message>& message) {
  for (const int layer : message->layers()) {
    left_[layer] = message;
  }
  if (!thread_) {
    return;
  }
  std::vector<std::size_t> keys(message->layers().begin(), message->layers().end());
  std::map<int, Inverses> inverses;
  for (const int layer : message->layers()) {
    inverses[layer] = inverses_[layer];
  }
  (*thread_)->follow({[message] { message->wait(); }, std::move(keys),
                      [message, inverses = std::move(inverses), work = work_](std::size_t layer) {
                        const int number = static_cast<int>(layer);
                        return make(number, *message, inverses.at(number), *work);
                      }});
}

RowDirection RowDirections::made(int layer) {
  if (!thread_ || ending_) {
    if (thread_) {
      (*thread_)->end();  // the wait for it may be what was interrupted
      left_.at(layer)->wait();
    }
    return make(layer, *left_.at(layer), inverses_[layer], *work_);
  }
  return (*thread_)->use(static_cast<std::size_t>(layer), [](RowDirection& made) { return made; });
}

void RowDirections::next() {
  ending_ = true;
  if (thread_) {
    (*thread_)->end();
  }
  rows_.next();
  left_.clear();
  ending_ = false;
}

}  // namespace torchext
