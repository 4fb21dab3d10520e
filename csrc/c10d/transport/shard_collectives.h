// ShardCollectives: reduce-scatter and all-gather of a buffer of equal chunks by a group's own collectives.
//
// The group carries nothing else: its operations come from a thread, and their order would not be the same on all ranks
// among collectives of the training thread. With NCCL that is a communicator of its own.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "c10d/transport/shard_transport.h"

namespace torchext {

class ShardCollectives : public ShardTransport {
 public:
  explicit ShardCollectives(c10::intrusive_ptr<c10d::Backend> group) : group_(std::move(group)) {}

  std::unique_ptr<ShardOperation> reduceScatter(const at::Tensor& buffer, double scale) override;
  std::unique_ptr<ShardOperation> allGather(const at::Tensor& buffer) override;
  std::uint64_t bytesSent() const override { return bytes_sent_; }

 private:
  class Operation;

  c10::intrusive_ptr<c10d::Backend> group_;
  std::atomic<std::uint64_t> bytes_sent_ = 0;  // stats() asks while the thread of exchanges counts
};

}  // namespace torchext
