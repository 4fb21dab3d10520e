#include "ddp/hop/hop_slots.h"

#include <ATen/ops/empty.h>

namespace torchext {

HopSlots::HopSlots(const core::CommunicationGraph& graph, const core::HopMode& mode, int rank, std::size_t model_bytes)
    : options_{.senders = graph.inNeighbours(rank),
               .weights = graph.inWeights(rank),
               .max_ahead = core::largestLead(mode, graph),
               .backup_workers = mode.backup_workers,
               .staleness = mode.staleness},
      max_ahead_(options_.max_ahead),
      model_bytes_(model_bytes),
      memory_(at::empty({static_cast<std::int64_t>(max_ahead_ + 1) *
                         static_cast<std::int64_t>(options_.senders.size()) * static_cast<std::int64_t>(model_bytes)},
                        at::kByte)),
      sending_(static_cast<std::size_t>(max_ahead_) + 1, 0) {}

void HopSlots::beginSession() { queue_ = std::make_unique<core::UpdateQueue>(options_); }

std::byte* HopSlots::block(int slot) const {
  return static_cast<std::byte*>(memory_.mutable_data_ptr()) + static_cast<std::size_t>(slot) * model_bytes_;
}

}  // namespace torchext
