// ShardExchange: reduce-scatter and all-gather of a buffer of equal chunks, one a rank, by point-to-point.
//
// Algorithm (core/transport/shard_schedule.h). Small chunks are exchanged directly, in one latency. Larger ones go
// along the sides of a grid of ranks, in segments: on a side a rank only sends to the next one, what came from the one
// before with its own added (or copied). One sender a link, so that no queue of the network overflows: with three
// senders a link at 1 Gb/s about one packet a training step was lost, and cost up to 90 ms.
// Sums are formed in a fixed order, so results repeat bit by bit. The owner of a chunk sums it, and all get its result.
//
// The path of data. begin() lists a rank's messages (shard_messages.h) and posts what depends on nothing. finish()
// waits for what comes, message by message, adds it, and posts what may leave then: segments travel while others are
// added.
//
// Memory: reduce-scatters keep a few segments for what arrives, all-gathers nothing.
// Mismatch: the ranks must agree on the order and sizes of operations (csrc/ddp agrees on its plans), and on the grid.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "c10d/transport/point_to_point.h"
#include "c10d/transport/reduction.h"
#include "c10d/transport/shard_transport.h"
#include "core/transport/shard_schedule.h"

namespace torchext {

struct ShardTuning {
  std::size_t direct_chunk_bytes = 1U << 15U;        // the largest chunk that is exchanged directly
  std::size_t direct_chunk_bytes_rooms = 1U << 12U;  // the same where a grid has several sides: uplinks are slow
  std::size_t segment_bytes = 1U << 18U;             // the largest message
  std::size_t messages_ahead = 12;                   // receives posted ahead, and direct sends
};

class ShardExchange : public ShardTransport {
 public:
  // tag_base and tag_base + 1 are this object's tags on the backend.
  // grid: none: a ring in the order of ranks.
  ShardExchange(PointToPoint transport, int tag_base, ShardTuning tuning = {},
                const std::optional<core::RankGrid>& grid = std::nullopt);

  // buffer: on the CPU; a reducible dtype.
  std::unique_ptr<ShardOperation> reduceScatter(const at::Tensor& buffer, double scale) override;
  std::unique_ptr<ShardOperation> allGather(const at::Tensor& buffer) override;
  std::uint64_t bytesSent() const override { return bytes_sent_; }

 private:
  struct Rounds {
    std::vector<core::ShardRound> direct;
    std::vector<core::ShardRound> along_grid;
  };
  class Operation;
  class ReduceScatter;
  class AllGather;
  std::byte* scratch();

  PointToPoint transport_;
  int tag_base_;
  ShardTuning tuning_;
  std::size_t direct_chunk_bytes_;
  Rounds reduce_scatter_;
  Rounds all_gather_;
  std::atomic<std::uint64_t> bytes_sent_ = 0;  // stats() asks while the thread of exchanges counts
  // Of two reduce-scatters at a time, taken in turn.
  std::unique_ptr<std::byte[]> scratch_[2];
  int turn_ = 0;
};

}  // namespace torchext
