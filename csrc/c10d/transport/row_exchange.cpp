#include "c10d/transport/row_exchange.h"

#include <algorithm>
#include <optional>
#include <utility>

#include <c10/util/Exception.h>

namespace torchext {
namespace {

// A message then takes milliseconds on a link of a Gb/s, where starting one takes tenths of it.
constexpr std::int64_t kEnoughBytes = std::int64_t{192} << 10;
// Integers up to it are exact in a float.
constexpr std::int64_t kSteps = std::int64_t{1} << 24;
constexpr double kTooMany = -1;    // rows for their place
constexpr double kAbandoned = -2;  // by this rank

}  // namespace

std::size_t RowExchange::Message::placeOf(int matrix) const {
  return static_cast<std::size_t>(std::find(numbers_.begin(), numbers_.end(), matrix) - numbers_.begin());
}

at::Tensor RowExchange::Message::rowsOf(int rank, const Place& place, bool inputs) const {
  const Matrix& matrix = place.matrix;
  const std::int64_t width = inputs ? matrix.inputs : matrix.outputs;
  return all_.select(0, rank)
      .narrow(0, inputs ? place.inputs : place.outputs, matrix.places * width)
      .view({matrix.places, width});
}

double RowExchange::Message::number(int rank, std::int64_t place) const {
  return all_.select(0, rank).select(0, place).item<double>();
}

void RowExchange::Message::checkSent(int rank) const {
  const double step = number(rank, 0);
  if (step != static_cast<double>(step_)) {
    C10_THROW_ERROR(DistBackendError, c10::str(what_, ": rank ", rank, " has taken ", step,
                                               " steps in which the rows of all ranks are gathered, this rank ", step_,
                                               "; step() is collective: take or leave it on all ranks alike"));
  }
  for (const Place& place : places_) {
    const double rows = number(rank, place.count);
    // Written so that what is not a number is none.
    const bool fits = rows >= 0 && rows <= static_cast<double>(place.matrix.places);
    if (rows != kTooMany && rows != kAbandoned && !fits) {
      C10_THROW_ERROR(DistBackendError, c10::str(what_, ": what rank ", rank, " has sent is no rows of batches"));
    }
  }
}

void RowExchange::Message::restart() {
  come_ = false;
  missing_ = 0;
  for (Place& place : places_) {
    place.kept = 0;
    missing_ += place.usual > 0 ? 1 : 0;
  }
}

void RowExchange::Message::wait() {
  while (!coming_.empty()) {  // one after the other: a wait that was interrupted goes on where it was
    coming_.back()->wait();
    coming_.pop_back();
  }
  for (int rank = 0; !come_ && rank < static_cast<int>(all_.size(0)); ++rank) {
    checkSent(rank);
  }
  come_ = true;
}

RowExchange::Rows RowExchange::Message::rows(int matrix) const {
  const Place& place = places_[placeOf(matrix)];
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> gradients;
  for (int rank = 0; rank < static_cast<int>(all_.size(0)); ++rank) {
    const auto rows = static_cast<std::int64_t>(number(rank, place.count));
    if (rows < 0) {
      return {};
    }
    if (rows > 0) {
      inputs.push_back(rowsOf(rank, place, true).narrow(0, 0, rows));
      gradients.push_back(rowsOf(rank, place, false).narrow(0, 0, rows));
    }
  }
  if (inputs.empty()) {
    return {};
  }
  return {inputs.size() == 1 ? inputs.front() : at::cat(inputs),
          gradients.size() == 1 ? gradients.front() : at::cat(gradients)};
}

bool RowExchange::Message::tooMany(int matrix) const {
  const Place& place = places_[placeOf(matrix)];
  for (int rank = 0; rank < static_cast<int>(all_.size(0)); ++rank) {
    if (number(rank, place.count) == kTooMany) {
      return true;
    }
  }
  return false;
}

std::optional<int> RowExchange::Message::abandonedBy() const {
  for (int rank = 0; rank < static_cast<int>(all_.size(0)); ++rank) {
    if (number(rank, places_.front().count) == kAbandoned) {
      return rank;
    }
  }
  return std::nullopt;
}

RowExchange::RowExchange(std::vector<Matrix> matrices, const at::TensorOptions& options, std::optional<RowLinks> links,
                         int tag, const char* what, Left left)
    : matrices_(std::move(matrices)),
      options_(options),
      links_(std::move(links)),
      tag_(tag),
      what_(what),
      when_left_(std::move(left)) {
  if (links_) {
    rank_ = links_->rank;
    ranks_ = links_->ranks;
  }
  const auto width = static_cast<std::int64_t>(options.dtype().itemsize());
  std::int64_t elements = 0;
  for (const Matrix& matrix : matrices_) {
    if (messages_.empty() || elements * width >= kEnoughBytes) {
      messages_.push_back(std::make_shared<Message>());
      elements = 0;
    }
    messages_.back()->numbers_.push_back(matrix.number);
    messages_.back()->places_.push_back({.matrix = matrix});
    elements += matrix.places * (matrix.inputs + matrix.outputs);
  }
  for (const auto& message : messages_) {
    std::int64_t end = 1;
    for (Message::Place& place : message->places_) {
      place.count = end++;
    }
    for (Message::Place& place : message->places_) {
      place.inputs = end;
      place.outputs = end + place.matrix.places * place.matrix.inputs;
      end = place.outputs + place.matrix.places * place.matrix.outputs;
    }
    message->all_ = at::zeros({ranks_, end}, options);
    message->what_ = what_;
  }
}

RowExchange::Message* RowExchange::find(int matrix) const {
  for (const auto& message : messages_) {
    if (std::find(message->numbers_.begin(), message->numbers_.end(), matrix) != message->numbers_.end()) {
      return message.get();
    }
  }
  return nullptr;
}

void RowExchange::expect(int matrix, std::int64_t rows) {
  Message& message = *find(matrix);
  message.places_[message.placeOf(matrix)].usual = rows;
  message.restart();
}

void RowExchange::keep(int matrix, const at::Tensor& input, const at::Tensor& gradient) {
  Message& message = *find(matrix);
  receive();
  if (message.left_) {
    return;
  }
  Message::Place& place = message.places_[message.placeOf(matrix)];
  const std::int64_t rows = input.numel() / place.matrix.inputs;
  const std::int64_t before = place.kept;
  place.kept += rows;
  if (place.kept <= place.matrix.places) {
    message.rowsOf(rank_, place, true).narrow(0, before, rows).copy_(input.reshape({rows, place.matrix.inputs}));
    message.rowsOf(rank_, place, false).narrow(0, before, rows).copy_(gradient.reshape({rows, place.matrix.outputs}));
  }
  // Once: a matrix may have more rows than usual before the message's other matrices have theirs.
  if (before < place.usual && place.kept >= place.usual && --message.missing_ == 0 && travels()) {
    for (std::size_t number = 0; number < messages_.size(); ++number) {
      if (messages_[number].get() == &message) {
        send(number);
      }
    }
  }
}

void RowExchange::forget() {
  for (const auto& message : messages_) {
    if (!message->left_) {
      message->restart();
    }
  }
}

void RowExchange::forget(int matrix) {
  Message& message = *find(matrix);
  Message::Place& place = message.places_[message.placeOf(matrix)];
  if (!message.left_) {
    message.missing_ += place.usual > 0 && place.kept >= place.usual ? 1 : 0;
    place.kept = 0;
  }
}

void RowExchange::overflow(int matrix) {
  Message& message = *find(matrix);
  Message::Place& place = message.places_[message.placeOf(matrix)];
  place.kept = std::max(place.kept, place.matrix.places + 1);
}

void RowExchange::receive() {
  if (receiving_ || !travels()) {
    return;
  }
  receiving_ = true;
  for (std::size_t number = 0; number < messages_.size(); ++number) {
    Message& message = *messages_[number];
    for (int distance = 1; distance < ranks_; ++distance) {
      const int from = (rank_ + ranks_ - distance) % ranks_;
      message.coming_.push_back(
          links_->receive(message.all_.narrow(0, from, 1), from, tag_ + static_cast<int>(number)));
    }
  }
}

void RowExchange::send(std::size_t number, bool abandoned) {
  Message& message = *messages_[number];
  message.left_ = true;
  message.step_ = step_ % kSteps;
  const at::Tensor own = message.all_.select(0, rank_);
  own.select(0, 0).fill_(static_cast<double>(message.step_));
  for (const Message::Place& place : message.places_) {
    const double kept = place.kept <= place.matrix.places ? static_cast<double>(place.kept) : kTooMany;
    own.select(0, place.count).fill_(abandoned ? kAbandoned : kept);
  }
  if (travels()) {
    for (int distance = 1; distance < ranks_; ++distance) {
      message.going_.push_back(links_->send(own, (rank_ + distance) % ranks_, tag_ + static_cast<int>(number)));
    }
  }
  if (links_ && links_->gather) {
    links_->gather(message.all_.unbind());
  }
  when_left_(messages_[number]);
}

void RowExchange::leave() { sendRest(/*abandoned=*/false); }

void RowExchange::abandon() { sendRest(/*abandoned=*/true); }

void RowExchange::sendRest(bool abandoned) {
  receive();
  for (std::size_t number = 0; number < messages_.size(); ++number) {
    if (!messages_[number]->left_) {
      send(number, abandoned);
    }
  }
}

void RowExchange::leave(int matrix) {
  receive();
  const Message* message = find(matrix);
  for (std::size_t number = 0; number < messages_.size(); ++number) {
    if (messages_[number].get() == message && !message->left_) {
      send(number);
    }
  }
}

void RowExchange::next() {
  for (const auto& message : messages_) {
    message->wait();
    for (const Work& work : message->going_) {
      work->wait();
    }
    message->going_.clear();
  }
  for (const auto& message : messages_) {
    message->left_ = false;
    message->restart();
  }
  receiving_ = false;
  ++step_;
}

std::size_t RowExchange::bytes() const {
  std::size_t bytes = 0;
  for (const auto& message : messages_) {
    bytes += message->all_.nbytes();
  }
  return bytes;
}

}  // namespace torchext
