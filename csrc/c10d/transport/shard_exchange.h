// ShardExchange: reduce-scatter and all-gather of a buffer of equal chunks, one a rank, by point-to-point.
//
// Algorithm, chosen by size; a rank moves (n - 1) / n of the buffer each way in both:
//   direct   small chunks: in round k = 1 .. n - 1 rank r sends to r + k and receives from r - k: in a reduce-scatter
//            the chunk that the receiver owns, in an all-gather its own. One latency instead of n - 1.
//   ring     large chunks, in segments: rank r only sends to r + 1, what came from r - 1 with its own added (or
//            copied). One sender a link, so that no queue of the network overflows: with three senders a link at 1 Gb/s
//            about one packet a training step was lost, and cost up to 90 ms.
// Sums are formed in a fixed order, so results repeat bit by bit.
//
// Memory: reduce-scatters keep a few segments for what arrives, all-gathers nothing.
// Mismatch: the ranks must agree on the order and sizes of operations (csrc/ddp agrees on its plans).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "c10d/transport/point_to_point.h"
#include "c10d/transport/reduction.h"
#include "c10d/transport/shard_transport.h"

namespace torchext {

struct ShardTuning {
  std::size_t direct_chunk_bytes = 1U << 15U;  // the largest chunk that is exchanged directly
  std::size_t segment_bytes = 1U << 18U;       // the largest message
  std::size_t messages_ahead = 12;             // receives posted ahead, and sends where they depend on nothing
};

class ShardExchange : public ShardTransport {
 public:
  class Operation : public ShardOperation {
   public:
    void begin() override;
    void finish(const std::function<void()>& posted) override;
    void drain() override;

   protected:
    Operation(ShardExchange& exchange, const at::Tensor& buffer, int tag, const char* name);
    int size() const { return exchange_.transport_.size(); }
    int self() const { return exchange_.transport_.rank(); }
    // The rank `distance` behind this one.
    int before(int distance) const { return ((self() - distance) % size() + size()) % size(); }
    bool ring() const { return ring_; }
    std::byte* at(int chunk, std::size_t segment) const {
      return data_ + static_cast<std::size_t>(chunk) * chunk_bytes_ + segment * segment_bytes_;
    }
    std::size_t bytes(std::size_t segment) const;

    // Which chunk is sent and received in a round (0 .. n - 2).
    virtual int sentChunk(int round) const = 0;
    virtual int receivedChunk(int round) const = 0;
    virtual void prepare() {}
    // Where a message arrives; slot: its number among those under way.
    virtual std::byte* target(int chunk, std::size_t segment, std::size_t slot) = 0;
    virtual void arrived(int /*chunk*/, std::size_t /*segment*/, std::size_t /*slot*/, bool /*last_round*/) {}
    virtual void alone() {}

    ShardExchange& exchange_;

   private:
    // Messages are numbered: in a ring all segments of a round, then the next round; directly all rounds of a segment.
    std::size_t rounds() const { return static_cast<std::size_t>(size() - 1); }
    std::size_t messages() const { return segments_ * rounds(); }
    int round(std::size_t message) const { return static_cast<int>(ring_ ? message / segments_ : message % rounds()); }
    std::size_t segment(std::size_t message) const { return ring_ ? message % segments_ : message / rounds(); }
    int source(std::size_t message) const { return before(ring_ ? 1 : round(message) + 1); }
    int destination(std::size_t message) const { return before(ring_ ? -1 : -(round(message) + 1)); }
    void postReceive(std::size_t message);
    void postSend(std::size_t message);

    at::Tensor buffer_;  // kept alive
    std::byte* data_;
    std::size_t chunk_bytes_;
    bool ring_;
    std::size_t segment_bytes_;
    std::size_t segments_;
    std::size_t ahead_ = 1;
    int tag_;
    const char* name_;
    std::vector<PointToPoint::WorkPtr> receives_;               // [message % ahead_]
    std::vector<std::pair<PointToPoint::WorkPtr, int>> sends_;  // with their destinations
  };

  // tag_base and tag_base + 1 are this object's tags on the backend.
  ShardExchange(PointToPoint transport, int tag_base, ShardTuning tuning = {});

  // buffer: on the CPU; a reducible dtype.
  std::unique_ptr<ShardOperation> reduceScatter(const at::Tensor& buffer, double scale) override;
  std::unique_ptr<ShardOperation> allGather(const at::Tensor& buffer) override;
  std::uint64_t bytesSent() const override { return bytes_sent_; }

 private:
  class ReduceScatter;
  class AllGather;
  std::byte* scratch();

  PointToPoint transport_;
  int tag_base_;
  ShardTuning tuning_;
  std::atomic<std::uint64_t> bytes_sent_ = 0;  // stats() asks while the thread of exchanges counts
  // Of two reduce-scatters at a time, taken in turn.
  std::unique_ptr<std::byte[]> scratch_[2];
  int turn_ = 0;
};

}  // namespace torchext
