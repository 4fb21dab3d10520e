// DeviceCommunicator exchanges tensors of an accelerator by its backend's collectives; works are queued in its streams.
//
// All messages of a kind start together. They must: NCCL knows no tags and keeps the order between two ranks, so that
// single ones would wait for each other. With tensors of the CPU, which tests hand it, messages start one by one.
//
// Threads, errors: as communicator.h.
#pragma once

#include <memory>

#include "kfac/comm/message_communicator.h"

namespace torchext {

class DeviceCommunicator final : public MessageCommunicator {
 public:
  DeviceCommunicator(c10::intrusive_ptr<c10d::ProcessGroup> group, std::shared_ptr<GroupHealth> model,
                     at::Device device);

  void bring(Parcels parcels) override;
};

}  // namespace torchext
