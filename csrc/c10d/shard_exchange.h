// ShardExchange: reduce-scatter and all-gather of a buffer of equal chunks, one a rank, by point-to-point.
//
// Algorithm: pairwise exchange. Rank r sends chunk d straight to its owner d (reduce-scatter) or its own chunk to
// everybody (all-gather), beginning with rank r + 1, so that no rank is everybody's first target. A rank moves
// (n - 1) / n of the buffer each way, as in a ring, but nothing depends on anything that arrived before: one latency
// instead of n - 1, and a chunk is added up where it ends, in a fixed order (own, r - 1, r - 2, ...), so results repeat
// bit by bit.
//
// Operations run in two halves, so that the link is not idle between two of them: begin() posts what can be posted,
// finish() blocks. Begin the next operation when the current one says that all its receives are posted.
//
// Memory: reduce-scatters keep a few segments per peer for what arrives, all-gathers nothing.
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

// Bytes.
struct ShardTuning {
  std::size_t segment_bytes = 1U << 20U;       // longest message of a reduce-scatter
  std::size_t scratch_bytes = 8U << 20U;       // of all segments that may arrive ahead, for both operations under way
  std::size_t least_segment_bytes = 1U << 15U;
  std::size_t segments_ahead = 2;              // receives posted for a peer
};

class ShardExchange {
 public:
  class Operation {
   public:
    virtual ~Operation() = default;
    virtual void begin() = 0;
    // Blocks until the result is there. `posted` is called once, when every receive has been posted.
    virtual void finish(const std::function<void()>& posted) = 0;
    // Blocks until all that was sent may be overwritten.
    void drain();

   protected:
    explicit Operation(ShardExchange& exchange) : exchange_(exchange) {}
    void send(const void* data, std::size_t bytes, int destination, int tag);

    ShardExchange& exchange_;
    std::vector<std::pair<PointToPoint::WorkPtr, int>> sends_;
  };

  // tag_base and tag_base + 1 are this object's tags on the backend.
  ShardExchange(PointToPoint transport, int tag_base, ShardTuning tuning = {});

  // buffer: contiguous, on the CPU, as long as a multiple of the world size; a reducible dtype. It must live, and not
  // be touched, until drain() has returned.
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

  PointToPoint transport_;
  int tag_base_;
  ShardTuning tuning_;
  std::uint64_t bytes_sent_ = 0;
  // Scratch for two reduce-scatters at a time, taken in turn.
  std::unique_ptr<std::byte[]> scratch_[2];
  int turn_ = 0;
};

}  // namespace torchext
