// HopSlots holds the models of a Hop worker and of its in-neighbours in one block of memory, (1 + max_ahead) of each.
//
// Which model has which slot, and what may be averaged, is the update queue's business (core/hop/update_queue.h; Luo et
// al., ASPLOS 2019, section 4). The own models are what the lines send from: a model is kept until it has gone to every
// out-neighbour.
//
// Threads: the owner holds one lock around each call, but not while it moves or reads bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/ATen.h>

#include "core/hop/communication_graph.h"
#include "core/hop/hop_mode.h"
#include "core/hop/update_queue.h"

namespace torchext {

class HopSlots {
 public:
  // Allocates the memory, once.
  HopSlots(const core::CommunicationGraph& graph, const core::HopMode& mode, int rank, std::size_t model_bytes);

  // All slots are empty.
  void beginSession();

  core::UpdateQueue& queue() { return *queue_; }
  // Iterations that a neighbour can be ahead.
  int maxAhead() const { return max_ahead_; }
  std::size_t bytes() const { return memory_.nbytes(); }
  std::byte* block(int slot) const;
  std::byte* blockOf(int sender, std::int64_t tag) const { return block(queue_->slotOf(sender, tag)); }
  // Lines that still send the own model of this slot.
  int& sending(std::int64_t tag) { return sending_[static_cast<std::size_t>(tag % (max_ahead_ + 1))]; }

 private:
  const core::UpdateQueueOptions options_;
  const int max_ahead_;
  const std::size_t model_bytes_;
  const at::Tensor memory_;
  std::unique_ptr<core::UpdateQueue> queue_;  // of this session
  std::vector<int> sending_;                  // of own models, by slot
};

}  // namespace torchext
