#include "kfac/comm/device_communicator.h"

#include <utility>

namespace torchext {

DeviceCommunicator::DeviceCommunicator(c10::intrusive_ptr<c10d::ProcessGroup> group, std::shared_ptr<GroupHealth> model,
                                       at::Device device)
    : MessageCommunicator(std::move(group), std::move(model),
                          {.overlaps = false, .sums_at_once = false, .adds_shares = device.is_cpu()}) {}

std::unique_ptr<Delivery> DeviceCommunicator::deliver(std::vector<Delivery::Parcel> parcels) {
  return std::make_unique<GroupedDelivery>(
      rank(), [this](const std::vector<GroupedDelivery::Message>& messages) { return start(messages); },
      std::move(parcels));
}

std::vector<Communicator::Work> DeviceCommunicator::start(const std::vector<GroupedDelivery::Message>& messages) {
  std::vector<Work> works;
  const at::Device device = messages.front().slice.device();
  const bool together = !device.is_cpu();
  if (together) {
    group()->startCoalescing(device.type());
  }
  for (const auto& message : messages) {
    const Work work = message.sends ? send(message.slice, message.peer, message.tag)
                                    : receive(message.slice, message.peer, message.tag);
    if (!together) {
      works.push_back(work);
    }
  }
  if (together) {
    if (const Work work = group()->endCoalescing(device.type())) {
      works.push_back(work);
    }
  }
  return works;
}

}  // namespace torchext
