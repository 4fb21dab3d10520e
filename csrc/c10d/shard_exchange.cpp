#include "c10d/shard_exchange.h"

#include <algorithm>

#include <c10/util/Exception.h>

namespace torchext {
namespace {

enum Tag { kReduceScatter = 0, kAllGather = 1 };

std::size_t divideUp(std::size_t whole, std::size_t part) { return (whole + part - 1) / part; }

}  // namespace

void ShardExchange::Operation::send(const void* data, std::size_t bytes, int destination, int tag) {
  exchange_.bytes_sent_ += bytes;
  sends_.emplace_back(exchange_.transport_.send(data, bytes, destination, exchange_.tag_base_ + tag), destination);
}

void ShardExchange::Operation::drain() {
  for (const auto& [work, destination] : sends_) {
    exchange_.transport_.wait(work, destination, "send");
  }
  sends_.clear();
}

class ShardExchange::ReduceScatter : public Operation {
 public:
  ReduceScatter(ShardExchange& exchange, const at::Tensor& buffer, double scale)
      : Operation(exchange),
        buffer_(buffer),
        math_(reductionFor(buffer.scalar_type())),
        scale_(scale),
        data_(static_cast<std::byte*>(buffer.data_ptr())),
        chunk_elements_(static_cast<std::size_t>(buffer.numel()) /
                        static_cast<std::size_t>(exchange.transport_.size())) {}

  void begin() override {
    const auto peers = static_cast<std::size_t>(exchange_.peers());
    if (peers == 0) {
      return;
    }
    const ShardTuning& tuning = exchange_.tuning_;
    const std::size_t affordable = tuning.scratch_bytes / 2 / (peers * tuning.segments_ahead);
    const std::size_t most = std::clamp(affordable, tuning.least_segment_bytes, tuning.segment_bytes);
    segments_ = std::max<std::size_t>(1, divideUp(chunk_elements_ * math_.element_bytes, most));
    segment_elements_ = divideUp(chunk_elements_, segments_);
    segments_ = std::max<std::size_t>(1, divideUp(chunk_elements_, std::max<std::size_t>(1, segment_elements_)));
    ahead_ = std::min(tuning.segments_ahead, segments_);
    const int turn = exchange_.turn_ = 1 - exchange_.turn_;
    if (!exchange_.scratch_[turn]) {
      // Not a vector, which would write to every byte.
      exchange_.scratch_[turn].reset(
          new std::byte[std::max(tuning.least_segment_bytes, most) * peers * tuning.segments_ahead]);
    }
    scratch_ = exchange_.scratch_[turn].get();
    receives_.resize(ahead_ * peers);
    for (std::size_t segment = 0; segment < ahead_; ++segment) {
      for (int distance = 1; distance <= exchange_.peers(); ++distance) {
        postReceive(segment, distance);
      }
    }
    for (std::size_t segment = 0; segment < segments_; ++segment) {
      for (int distance = 1; distance <= exchange_.peers(); ++distance) {
        const int owner = exchange_.peer(distance);
        send(at(owner, segment), bytes(segment), owner, kReduceScatter);
      }
    }
  }

  void finish(const std::function<void()>& posted) override {
    const int self = exchange_.transport_.rank();
    if (exchange_.peers() == 0) {
      posted();
      if (scale_ != 1.0) {
        math_.multiply(data_, chunk_elements_, scale_);
      }
      return;
    }
    for (std::size_t segment = 0; segment < segments_; ++segment) {
      if (segment + ahead_ == segments_) {
        posted();
      }
      for (int distance = 1; distance <= exchange_.peers(); ++distance) {
        exchange_.transport_.wait(receive(segment, distance), exchange_.peer(-distance), "reduce_scatter");
        if (distance < exchange_.peers()) {
          math_.add(at(self, segment), slot(segment, distance), elements(segment));
        } else {
          math_.add_scaled(at(self, segment), slot(segment, distance), elements(segment), scale_);
        }
        if (segment + ahead_ < segments_) {
          postReceive(segment + ahead_, distance);
        }
      }
    }
    receives_.clear();
  }

 private:
  std::size_t elements(std::size_t segment) const {
    return std::min(segment_elements_, chunk_elements_ - segment * segment_elements_);
  }
  std::size_t bytes(std::size_t segment) const { return elements(segment) * math_.element_bytes; }
  std::byte* at(int owner, std::size_t segment) const {
    return data_ + (static_cast<std::size_t>(owner) * chunk_elements_ + segment * segment_elements_) *
                       math_.element_bytes;
  }
  std::size_t slotIndex(std::size_t segment, int distance) const {
    return segment % ahead_ * static_cast<std::size_t>(exchange_.peers()) + static_cast<std::size_t>(distance - 1);
  }
  std::byte* slot(std::size_t segment, int distance) const {
    return scratch_ + slotIndex(segment, distance) * segment_elements_ * math_.element_bytes;
  }
  PointToPoint::WorkPtr& receive(std::size_t segment, int distance) { return receives_[slotIndex(segment, distance)]; }
  void postReceive(std::size_t segment, int distance) {
    receive(segment, distance) = exchange_.transport_.recv(slot(segment, distance), bytes(segment),
                                                           exchange_.peer(-distance),
                                                           exchange_.tag_base_ + kReduceScatter);
  }

  at::Tensor buffer_;  // kept alive
  const Reduction& math_;
  double scale_;
  std::byte* data_;
  std::size_t chunk_elements_;
  std::size_t segments_ = 1;
  std::size_t segment_elements_ = 0;
  std::size_t ahead_ = 1;
  std::byte* scratch_ = nullptr;
  std::vector<PointToPoint::WorkPtr> receives_;
};

class ShardExchange::AllGather : public Operation {
 public:
  AllGather(ShardExchange& exchange, const at::Tensor& buffer)
      : Operation(exchange),
        buffer_(buffer),
        data_(static_cast<std::byte*>(buffer.data_ptr())),
        chunk_bytes_(buffer.nbytes() / static_cast<std::size_t>(exchange.transport_.size())) {}

  void begin() override {
    for (int distance = 1; distance <= exchange_.peers(); ++distance) {
      const int owner = exchange_.peer(-distance);
      receives_.push_back(
          exchange_.transport_.recv(chunk(owner), chunk_bytes_, owner, exchange_.tag_base_ + kAllGather));
    }
    for (int distance = 1; distance <= exchange_.peers(); ++distance) {
      send(chunk(exchange_.transport_.rank()), chunk_bytes_, exchange_.peer(distance), kAllGather);
    }
  }

  void finish(const std::function<void()>& posted) override {
    posted();
    for (int distance = 1; distance <= exchange_.peers(); ++distance) {
      exchange_.transport_.wait(receives_[static_cast<std::size_t>(distance - 1)], exchange_.peer(-distance),
                                "all_gather");
    }
  }

 private:
  std::byte* chunk(int owner) const { return data_ + static_cast<std::size_t>(owner) * chunk_bytes_; }

  at::Tensor buffer_;  // kept alive
  std::byte* data_;
  std::size_t chunk_bytes_;
  std::vector<PointToPoint::WorkPtr> receives_;
};

ShardExchange::ShardExchange(PointToPoint transport, int tag_base, ShardTuning tuning)
    : transport_(std::move(transport)), tag_base_(tag_base), tuning_(tuning) {}

std::unique_ptr<ShardExchange::Operation> ShardExchange::reduceScatter(const at::Tensor& buffer, double scale) {
  TORCH_INTERNAL_ASSERT(buffer.is_contiguous() && buffer.device().is_cpu() && buffer.numel() % transport_.size() == 0);
  return std::make_unique<ReduceScatter>(*this, buffer, scale);
}

std::unique_ptr<ShardExchange::Operation> ShardExchange::allGather(const at::Tensor& buffer) {
  TORCH_INTERNAL_ASSERT(buffer.is_contiguous() && buffer.device().is_cpu() && buffer.numel() % transport_.size() == 0);
  return std::make_unique<AllGather>(*this, buffer);
}

}  // namespace torchext
