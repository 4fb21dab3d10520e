#include "c10d/transport/shard_exchange.h"

#include <algorithm>

#include <c10/util/Exception.h>

namespace torchext {
namespace {

enum ShardTag { kShardReduceScatter = 0, kShardAllGather = 1 };

std::size_t divideUp(std::size_t whole, std::size_t part) { return (whole + part - 1) / part; }

}  // namespace

ShardExchange::Operation::Operation(ShardExchange& exchange, const at::Tensor& buffer, int tag, const char* name)
    : exchange_(exchange),
      buffer_(buffer),
      data_(static_cast<std::byte*>(buffer.data_ptr())),
      chunk_bytes_(buffer.nbytes() / static_cast<std::size_t>(exchange.transport_.size())),
      ring_(chunk_bytes_ > exchange.tuning_.direct_chunk_bytes),
      tag_(exchange.tag_base_ + tag),
      name_(name) {
  // Equal segments, of whole elements: a short one at the end would cost a message and hide nothing. In a ring at least
  // two, so that one travels while the other is added.
  const std::size_t element = buffer.element_size();
  const std::size_t elements = std::max<std::size_t>(1, chunk_bytes_ / element);
  const std::size_t most = std::max<std::size_t>(1, exchange.tuning_.segment_bytes / element);
  segment_bytes_ = divideUp(elements, std::max<std::size_t>(ring_ ? 2 : 1, divideUp(elements, most))) * element;
  segments_ = std::max<std::size_t>(1, divideUp(chunk_bytes_, segment_bytes_));
}

std::size_t ShardExchange::Operation::bytes(std::size_t segment) const {
  return std::min(segment_bytes_, chunk_bytes_ - segment * segment_bytes_);
}

void ShardExchange::Operation::postReceive(std::size_t message) {
  const std::size_t part = segment(message);
  const std::size_t slot = message % ahead_;
  receives_[slot] =
      exchange_.transport_.recv(target(receivedChunk(round(message)), part, slot), bytes(part), source(message), tag_);
}

void ShardExchange::Operation::postSend(std::size_t message) {
  const std::size_t part = segment(message);
  const int to = destination(message);
  sends_.emplace_back(exchange_.transport_.send(at(sentChunk(round(message)), part), bytes(part), to, tag_), to);
  exchange_.bytes_sent_ += bytes(part);
}

void ShardExchange::Operation::begin() {
  ahead_ = std::max<std::size_t>(1, std::min(exchange_.tuning_.messages_ahead, messages()));
  receives_.resize(ahead_);
  prepare();
  for (std::size_t message = 0; message < std::min(ahead_, messages()); ++message) {
    postReceive(message);
  }
  const std::size_t independent = ring_ ? segments_ : ahead_;
  for (std::size_t message = 0; message < std::min(independent, messages()); ++message) {
    postSend(message);
  }
}

void ShardExchange::Operation::finish(const std::function<void()>& posted) {
  if (messages() == 0) {
    posted();
    alone();
    return;
  }
  // What may be sent once a message is there: in a ring that very message, in the next round.
  const std::size_t lead = ring_ ? segments_ : ahead_;
  const std::size_t all_posted = messages() - std::min({lead, ahead_, messages()});
  for (std::size_t message = 0; message < messages(); ++message) {
    if (message == all_posted) {
      posted();
    }
    const std::size_t slot = message % ahead_;
    exchange_.transport_.wait(receives_[slot], source(message), name_);
    arrived(receivedChunk(round(message)), segment(message), slot,
            static_cast<std::size_t>(round(message)) + 1 == rounds());
    if (message + lead < messages()) {
      postSend(message + lead);
    }
    if (message + ahead_ < messages()) {
      postReceive(message + ahead_);
    }
  }
  receives_.clear();
}

void ShardExchange::Operation::drain() {
  for (const auto& [work, destination] : sends_) {
    exchange_.transport_.wait(work, destination, name_);
  }
  sends_.clear();
}

class ShardExchange::ReduceScatter : public Operation {
 public:
  ReduceScatter(ShardExchange& exchange, const at::Tensor& buffer, double scale)
      : Operation(exchange, buffer, kShardReduceScatter, "reduce_scatter"),
        math_(reductionFor(buffer.scalar_type())),
        scale_(scale),
        whole_(buffer) {}

 protected:
  // Ring: a chunk starts behind its owner and ends there, after everybody has added to it.
  int sentChunk(int round) const override { return before(ring() ? round + 1 : -(round + 1)); }
  int receivedChunk(int round) const override { return ring() ? before(round + 2) : self(); }
  void prepare() override { scratch_ = exchange_.scratch(); }
  std::byte* target(int /*chunk*/, std::size_t /*segment*/, std::size_t slot) override {
    return scratch_ + slot * exchange_.tuning_.segment_bytes;
  }
  void arrived(int chunk, std::size_t segment, std::size_t slot, bool last_round) override {
    const std::size_t count = bytes(segment) / math_.element_bytes;
    if (last_round) {
      math_.add_scaled(at(chunk, segment), target(chunk, segment, slot), count, scale_);
    } else {
      math_.add(at(chunk, segment), target(chunk, segment, slot), count);
    }
  }
  void alone() override {
    if (scale_ != 1.0) {
      math_.multiply(whole_.data_ptr(), static_cast<std::size_t>(whole_.numel()), scale_);
    }
  }

 private:
  const Reduction& math_;
  double scale_;
  at::Tensor whole_;
  std::byte* scratch_ = nullptr;
};

class ShardExchange::AllGather : public Operation {
 public:
  AllGather(ShardExchange& exchange, const at::Tensor& buffer)
      : Operation(exchange, buffer, kShardAllGather, "all_gather") {}

 protected:
  int sentChunk(int round) const override { return ring() ? before(round) : self(); }
  int receivedChunk(int round) const override { return before(round + 1); }
  std::byte* target(int chunk, std::size_t segment, std::size_t /*slot*/) override { return at(chunk, segment); }
};

ShardExchange::ShardExchange(PointToPoint transport, int tag_base, ShardTuning tuning)
    : transport_(std::move(transport)), tag_base_(tag_base), tuning_(tuning) {}

std::byte* ShardExchange::scratch() {
  turn_ = 1 - turn_;
  if (!scratch_[turn_]) {
    // Not a vector, which would write to every byte.
    scratch_[turn_].reset(new std::byte[tuning_.segment_bytes * tuning_.messages_ahead]);
  }
  return scratch_[turn_].get();
}

std::unique_ptr<ShardOperation> ShardExchange::reduceScatter(const at::Tensor& buffer, double scale) {
  TORCH_INTERNAL_ASSERT(buffer.is_contiguous() && buffer.device().is_cpu() && buffer.numel() % transport_.size() == 0);
  return std::make_unique<ReduceScatter>(*this, buffer, scale);
}

std::unique_ptr<ShardOperation> ShardExchange::allGather(const at::Tensor& buffer) {
  TORCH_INTERNAL_ASSERT(buffer.is_contiguous() && buffer.device().is_cpu() && buffer.numel() % transport_.size() == 0);
  return std::make_unique<AllGather>(*this, buffer);
}

}  // namespace torchext
