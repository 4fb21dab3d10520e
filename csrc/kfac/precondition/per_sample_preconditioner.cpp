#include "kfac/precondition/per_sample_preconditioner.h"

#include <algorithm>
#include <utility>

#include "core/base/check.h"
#include "kfac/precondition/kl_clip.h"

namespace torchext {

PerSamplePreconditioner::PerSamplePreconditioner(std::vector<RowExchange::Matrix> layers,
                                                 const at::TensorOptions& options, Communicator* comm, int tag)
    : rows_(std::move(layers), options, comm != nullptr ? std::optional(comm->rowLinks()) : std::nullopt, tag,
            "torchext.optim", [this](const std::shared_ptr<RowExchange::Message>& message) {
              for (const int layer : message->matrices()) {
                left_[layer] = message;
              }
            }) {
  if (rows_.travels()) {
    thread_.emplace("tx_rows", comm->watch());
  }
}

PerSampleProduct PerSamplePreconditioner::make(int layer, const RowExchange::Message& message, const Inverses& inverses,
                                               TiledProduct::Work& work) {
  const RowExchange::Rows rows = message.rows(layer);
  if (!rows.inputs.defined() || !inverses.of_inputs.defined() || !inverses.of_outputs.defined()) {
    return {};
  }
  const at::Tensor of_inputs = inverses.of_inputs.matrix.select(0, 0);
  const at::Tensor of_outputs = inverses.of_outputs.matrix.select(0, 0);
  if (inverses.tiled) {
    inverses.tiled->prepare(inverses.of_outputs.matrix, inverses.of_inputs.matrix, /*begin=*/0, of_inputs.size(0));
  }
  const auto make_as =
      rows.inputs.scalar_type() == at::kDouble ? &makePerSampleProduct<double> : &makePerSampleProduct<float>;
  return make_as(rows.inputs, rows.gradients, inverses.bias, of_inputs, of_outputs, inverses.tiled.get(), work);
}

// Undefined where the clip is not to be known, because some layer has no direction of rows.
WrittenGradient PerSamplePreconditioner::write(int layer, Ahead& ahead, const WrittenGradient& to, bool tiles,
                                               TiledProduct::Work& work) {
  const PerSampleProduct& made = ahead.made[core::index(layer)];
  if (std::any_of(ahead.made.begin(), ahead.made.end(),
                  [](const PerSampleProduct& any) { return !any.left.defined(); })) {
    return {};
  }
  if (!ahead.clip) {
    std::vector<double> products;
    for (std::size_t number = 0; number < ahead.made.size(); ++number) {
      const double factor = ahead.scaling.factors[number];
      products.push_back(factor * factor * ahead.made[number].product);
    }
    ahead.clip = klClip(ahead.scaling.kl_clip, ahead.scaling.rates, products);
  }
  WrittenGradient written{to.weight, made.bias ? to.bias : at::Tensor(),
                          *ahead.clip * ahead.scaling.factors[core::index(layer)]};
  const auto write_as = [&]<class T>(T* weight) {
    writePerSampleProduct<T>(made, written.factor, tiles, weight, made.bias ? to.bias.mutable_data_ptr<T>() : nullptr,
                             work);
  };
  if (to.weight.scalar_type() == at::kDouble) {
    write_as(to.weight.mutable_data_ptr<double>());
  } else {
    write_as(to.weight.mutable_data_ptr<float>());
  }
  return written;
}

void PerSamplePreconditioner::begin() {
  if (!thread_ || following_ || left_.size() != rows_.matrices().size()) {
    return;
  }
  following_ = true;
  if (foreseen_) {
    ahead_ = std::make_shared<Ahead>();
    ahead_->scaling = *foreseen_;
    ahead_->made.resize(foreseen_->factors.size());
  }
  std::vector<std::shared_ptr<RowExchange::Message>> messages;
  std::vector<std::size_t> keys;
  std::map<int, Source> sources;
  for (const RowExchange::Matrix& layer : rows_.matrices()) {
    const auto& message = left_.at(layer.number);
    if (messages.empty() || messages.back() != message) {
      messages.push_back(message);
    }
    keys.push_back(keyOfMade(layer.number));
    sources[layer.number] = {message, inverses_[layer.number], ahead_ ? placeFor(layer) : WrittenGradient()};
  }
  for (const RowExchange::Matrix& layer : rows_.matrices()) {
    if (ahead_) {
      keys.push_back(keyOfWritten(layer.number));
    }
  }
  const auto wait = [messages = std::move(messages)] {
    for (const auto& message : messages) {
      message->wait();
    }
  };
  const auto make_any = [sources = std::move(sources), ahead = ahead_, work = work_](std::size_t key) {
    const int layer = layerOf(key);
    const Source& of = sources.at(layer);
    Result result;
    if (key == keyOfWritten(layer)) {
      result.written = write(layer, *ahead, of.to, of.inverses.tiled != nullptr, *work);
      return result;
    }
    result.made = make(layer, *of.message, of.inverses, *work);
    if (ahead) {
      ahead->made[core::index(layer)] = result.made;
    }
    return result;
  };
  (*thread_)->follow({wait, std::move(keys), make_any});
}

const WrittenGradient& PerSamplePreconditioner::placeFor(const RowExchange::Matrix& layer) {
  WrittenGradient& to = written_[layer.number];
  if (!to.weight.defined()) {
    to.weight = at::empty({layer.outputs, layer.inputs}, rows_.options());
    to.bias = at::empty({layer.outputs}, rows_.options());
  }
  return to;
}

PerSampleProduct PerSamplePreconditioner::made(int layer) {
  if (!thread_ || ending_) {
    if (thread_) {
      (*thread_)->end();  // the wait for it may be what was interrupted
      left_.at(layer)->wait();
    }
    return make(layer, *left_.at(layer), inverses_[layer], *work_);
  }
  return (*thread_)->use(keyOfMade(layer), [](Result& result) { return result.made; });
}

WrittenGradient PerSamplePreconditioner::written(int layer) {
  if (!ahead_ || ending_) {
    return {};
  }
  return (*thread_)->use(keyOfWritten(layer), [](Result& result) { return result.written; });
}

void PerSamplePreconditioner::next() {
  ending_ = true;
  if (thread_) {
    (*thread_)->end();
  }
  rows_.next();
  left_.clear();
  ahead_.reset();
  following_ = false;
  ending_ = false;
}

std::size_t PerSamplePreconditioner::bytes() const {
  std::size_t bytes = 2 * rows_.bytes();
  for (const auto& [layer, to] : written_) {
    bytes += to.weight.nbytes() + to.bias.nbytes();
  }
  return bytes;
}

}  // namespace torchext
