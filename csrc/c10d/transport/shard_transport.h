// ShardTransport: how a buffer of equal chunks, one a rank, is reduce-scattered and gathered.
//
// Two implementations: ShardExchange (shard_exchange.h), by point-to-point on the CPU, and ShardCollectives
// (shard_collectives.h), by the collectives of a group of its own, for CUDA tensors and where the option says so.
//
// Operations run in two halves, so that the link is not idle between two of them: begin() posts the first messages,
// finish() waits for the last. Begin the next operation when the current one says that all its messages are posted.
// All ranks run the same operations in the same order.
// Threads: one; a transport and its operations belong to the thread that uses them. Never holds the GIL.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include <ATen/core/Tensor.h>

namespace torchext {

class ShardOperation {
 public:
  ShardOperation() = default;
  ShardOperation(const ShardOperation&) = delete;
  ShardOperation& operator=(const ShardOperation&) = delete;
  virtual ~ShardOperation() = default;

  virtual void begin() = 0;
  // Blocks until the result is there, for CUDA tensors in the order of the current stream. `posted` is called once,
  // when every message has been posted.
  virtual void finish(const std::function<void()>& posted) = 0;
  // Blocks until all that was sent may be overwritten.
  virtual void drain() = 0;
};

class ShardTransport {
 public:
  ShardTransport() = default;
  ShardTransport(const ShardTransport&) = delete;
  ShardTransport& operator=(const ShardTransport&) = delete;
  virtual ~ShardTransport() = default;

  // buffer: contiguous, its length a multiple of the world size. It must not be touched until drain() has returned.
  // Afterwards the own chunk is scale * sum of everybody's; the others are undefined.
  virtual std::unique_ptr<ShardOperation> reduceScatter(const at::Tensor& buffer, double scale) = 0;
  // Afterwards every chunk is its owner's.
  virtual std::unique_ptr<ShardOperation> allGather(const at::Tensor& buffer) = 0;

  // By this rank, since construction.
  virtual std::uint64_t bytesSent() const = 0;
};

}  // namespace torchext
