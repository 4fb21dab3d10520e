#include "c10d/transport/shard_exchange.h"

#include <algorithm>

#include <c10/util/Exception.h>

#include "c10d/transport/shard_messages.h"
#include "core/base/check.h"

namespace torchext {
namespace {

enum ShardTag { kShardReduceScatter = 0, kShardAllGather = 1 };

}  // namespace

class ShardExchange::Operation : public ShardOperation {
 public:
  void begin() override;
  void finish(const std::function<void()>& posted) override;
  void drain() override;

 protected:
  Operation(ShardExchange& exchange, const at::Tensor& buffer, const Rounds& rounds, int tag, const char* name)
      : exchange_(exchange),
        buffer_(buffer),
        chunk_bytes_(buffer.nbytes() / core::index(exchange.transport_.size())),
        direct_(chunk_bytes_ <= exchange.direct_chunk_bytes_),
        rounds_(direct_ ? rounds.direct : rounds.along_grid),
        tag_(exchange.tag_base_ + tag),
        name_(name) {}

  virtual void prepare() {}
  // Where a message arrives; slot: its number among those under way.
  virtual std::byte* target(const ShardMessage& message, std::size_t /*slot*/) { return message.data; }
  virtual void arrived(const ShardMessage& /*message*/, std::size_t /*slot*/, bool /*last_round*/) {}
  virtual void alone() {}

  ShardExchange& exchange_;
  at::Tensor buffer_;  // kept alive

 private:
  void postReceive(std::size_t message);
  void postSends(std::size_t arrived);

  const std::size_t chunk_bytes_;
  const bool direct_;
  const std::vector<core::ShardRound>& rounds_;
  const int tag_;
  const char* const name_;
  ShardMessages messages_;
  std::size_t sent_ = 0;                                      // of messages_.outgoing
  std::vector<PointToPoint::WorkPtr> receives_;               // [message % size()]
  std::vector<std::pair<PointToPoint::WorkPtr, int>> sends_;  // with their destinations
};

void ShardExchange::Operation::postReceive(std::size_t message) {
  const std::size_t slot = message % receives_.size();
  const ShardMessage& coming = messages_.incoming[message];
  receives_[slot] = exchange_.transport_.recv(target(coming, slot), coming.bytes, coming.peer, tag_);
}

void ShardExchange::Operation::postSends(std::size_t arrived) {
  for (; sent_ < messages_.outgoing.size() && messages_.outgoing[sent_].after <= arrived; ++sent_) {
    const ShardMessage& message = messages_.outgoing[sent_];
    sends_.emplace_back(exchange_.transport_.send(message.data, message.bytes, message.peer, tag_), message.peer);
    exchange_.bytes_sent_ += message.bytes;
  }
}

void ShardExchange::Operation::begin() {
  const ShardTuning& tuning = exchange_.tuning_;
  messages_ = shardMessages(rounds_, static_cast<std::byte*>(buffer_.data_ptr()),
                            {.chunk_bytes = chunk_bytes_,
                             .element_bytes = static_cast<std::size_t>(buffer_.element_size()),
                             .segment_bytes = tuning.segment_bytes,
                             .independent = direct_ ? tuning.messages_ahead : 0});
  receives_.resize(std::max<std::size_t>(1, std::min(tuning.messages_ahead, messages_.incoming.size())));
  prepare();
  for (std::size_t message = 0; message < std::min(receives_.size(), messages_.incoming.size()); ++message) {
    postReceive(message);
  }
  postSends(0);
}

void ShardExchange::Operation::finish(const std::function<void()>& posted) {
  bool told = false;
  for (std::size_t message = 0; message < messages_.incoming.size(); ++message) {
    if (!told && sent_ == messages_.outgoing.size() && message + receives_.size() >= messages_.incoming.size()) {
      posted();
      told = true;
    }
    const std::size_t slot = message % receives_.size();
    const ShardMessage& coming = messages_.incoming[message];
    exchange_.transport_.wait(receives_[slot], coming.peer, name_);
    arrived(coming, slot, coming.round + 1 == rounds_.size());
    postSends(message + 1);
    if (message + receives_.size() < messages_.incoming.size()) {
      postReceive(message + receives_.size());
    }
  }
  if (!told) {
    posted();
  }
  if (messages_.incoming.empty()) {
    alone();
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
      : Operation(exchange, buffer, exchange.reduce_scatter_, kShardReduceScatter, "reduce_scatter"),
        math_(reductionFor(buffer.scalar_type())),
        scale_(scale) {}

 protected:
  void prepare() override { scratch_ = exchange_.scratch(); }
  std::byte* target(const ShardMessage& /*message*/, std::size_t slot) override {
    return scratch_ + slot * exchange_.tuning_.segment_bytes;
  }
  void arrived(const ShardMessage& message, std::size_t slot, bool last_round) override {
    const std::size_t count = message.bytes / math_.element_bytes;
    if (last_round) {
      math_.add_scaled(message.data, target(message, slot), count, scale_);
    } else {
      math_.add(message.data, target(message, slot), count);
    }
  }
  void alone() override {
    if (scale_ != 1.0) {
      math_.multiply(buffer_.data_ptr(), static_cast<std::size_t>(buffer_.numel()), scale_);
    }
  }

 private:
  const Reduction& math_;
  double scale_;
  std::byte* scratch_ = nullptr;
};

class ShardExchange::AllGather : public Operation {
 public:
  AllGather(ShardExchange& exchange, const at::Tensor& buffer)
      : Operation(exchange, buffer, exchange.all_gather_, kShardAllGather, "all_gather") {}
};

ShardExchange::ShardExchange(PointToPoint transport, int tag_base, ShardTuning tuning,
                             const std::optional<core::RankGrid>& grid)
    : transport_(std::move(transport)), tag_base_(tag_base), tuning_(tuning) {
  const int ranks = transport_.size();
  const int rank = transport_.rank();
  const core::RankGrid places = grid.value_or(core::ringGrid(ranks));
  TORCH_INTERNAL_ASSERT(static_cast<int>(places.order.size()) == ranks);
  direct_chunk_bytes_ = places.sides.size() > 1 ? tuning_.direct_chunk_bytes_rooms : tuning_.direct_chunk_bytes;
  reduce_scatter_ = {core::directReduceScatterRounds(ranks, rank), core::reduceScatterRounds(places, rank)};
  all_gather_ = {core::directAllGatherRounds(ranks, rank), core::allGatherRounds(places, rank)};
}

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
