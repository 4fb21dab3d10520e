// ShardExchange: reduce-scatter and all-gather of a buffer of equal chunks, one a rank, by point-to-point.
//
// Algorithm: pairwise exchange. In round k = 1 .. n - 1 rank r sends to r + k and receives from r - k: in a
// reduce-scatter the chunk that the receiver owns, in an all-gather its own. A rank moves (n - 1) / n of the buffer
// each way, as in a ring, but nothing depends on anything that arrived before: one latency instead of n - 1, and a
// chunk is added up where it ends, in a fixed order (own, r - 1, r - 2, ...), so results repeat bit by bit. Chunks are
// cut into segments. A few messages are sent ahead, then one for each that has arrived, which bounds what the queues of
// the network and this rank's scratch memory have to hold.
//
// Operations run in two halves, so that the link is not idle between two of them: begin() posts the first segments,
// finish() blocks. Begin the next operation when the current one says that all its messages are posted.
//
// Memory: reduce-scatters keep a few segments for what arrives, all-gathers nothing.
// Mismatch: the ranks must agree on the order and sizes of operations (csrc/ddp agrees on its plans).
// Threads: one; the object and its operations belong to the thread that uses them. Never holds the GIL.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "c10d/point_to_point.h"
#include "c10d/reduction.h"

namespace torchext {

// Measured on four hosts at 1 Gb/s: with half as much ahead the link runs dry now and then, longer segments wait for
// each other.
struct ShardTuning {
  std::size_t segment_bytes = 1U << 18U;
  std::size_t messages_ahead = 12;
};

class ShardExchange {
 public:
  class Operation {
   public:
    virtual ~Operation() = default;
    void begin();
    // Blocks until the result is there. `posted` is called once, when every message has been posted.
    void finish(const std::function<void()>& posted);
    // Blocks until all that was sent may be overwritten.
    void drain();

   protected:
    // Both per chunk.
    Operation(ShardExchange& exchange, const at::Tensor& buffer, int tag, const char* name);
    std::byte* at(int rank, std::size_t segment) const {
      return data_ + static_cast<std::size_t>(rank) * chunk_bytes_ + segment * segment_bytes_;
    }
    std::size_t bytes(std::size_t segment) const;
    int self() const { return exchange_.transport_.rank(); }

    virtual void prepare() {}
    // Of message number `slot` of those under way.
    virtual std::byte* target(int source, std::size_t segment, std::size_t slot) = 0;
    virtual const std::byte* source(int destination, std::size_t segment) = 0;
    virtual void arrived(std::size_t /*segment*/, std::size_t /*slot*/, bool /*last_round*/) {}
    virtual void alone() {}

    ShardExchange& exchange_;
    std::size_t ahead_ = 1;

   private:
    std::size_t messages() const { return segments_ * static_cast<std::size_t>(exchange_.peers()); }
    // All rounds of one segment, then the next segment: every link has all its senders all the time.
    int round(std::size_t message) const { return 1 + static_cast<int>(message) % exchange_.peers(); }
    std::size_t segment(std::size_t message) const { return message / static_cast<std::size_t>(exchange_.peers()); }
    void post(std::size_t message);

    at::Tensor buffer_;  // kept alive
    std::byte* data_;
    std::size_t chunk_bytes_;
    std::size_t segment_bytes_;
    std::size_t segments_;
    int tag_;
    const char* name_;
    std::vector<PointToPoint::WorkPtr> receives_;               // [message % ahead_]
    std::vector<std::pair<PointToPoint::WorkPtr, int>> sends_;  // with their destinations
  };

  // tag_base and tag_base + 1 are this object's tags on the backend.
  ShardExchange(PointToPoint transport, int tag_base, ShardTuning tuning = {});

  // buffer: contiguous, on the CPU, its length a multiple of the world size; a reducible dtype. It must not be touched
  // until drain() has returned.
  // Afterwards the own chunk is scale * sum of everybody's; the others are as they were.
  std::unique_ptr<Operation> reduceScatter(const at::Tensor& buffer, double scale);
  // Afterwards every chunk is its owner's.
  std::unique_ptr<Operation> allGather(const at::Tensor& buffer);

  std::uint64_t bytesSent() const { return bytes_sent_; }

 private:
  class ReduceScatter;
  class AllGather;
  int peer(int distance) const { return (transport_.rank() + distance + transport_.size()) % transport_.size(); }
  int peers() const { return transport_.size() - 1; }
  std::byte* scratch();

  PointToPoint transport_;
  int tag_base_;
  ShardTuning tuning_;
  std::uint64_t bytes_sent_ = 0;
  // Of two reduce-scatters at a time, taken in turn.
  std::unique_ptr<std::byte[]> scratch_[2];
  int turn_ = 0;
};

}  // namespace torchext
