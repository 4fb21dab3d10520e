#include "kfac/comm/device_communicator.h"

#include <utility>

namespace torchext {

DeviceCommunicator::DeviceCommunicator(c10::intrusive_ptr<c10d::ProcessGroup> group, std::shared_ptr<GroupHealth> model,
                                       at::Device device)
    : MessageCommunicator(std::move(group), std::move(model),
                          {.overlaps = false, .sums_at_once = false, .adds_shares = device.is_cpu()}) {}

void DeviceCommunicator::bring(Parcels parcels) {
  const bool concerned = std::any_of(parcels.begin(), parcels.end(), [this](const Parcel& parcel) {
    return parcel.from == rank() || parcel.comesTo(rank());
  });
  if (!concerned) {
    return;
  }
  const at::Device device = parcels.front().slice.device();
  if (device.is_cpu()) {
    MessageCommunicator::bring(parcels);
    return;
  }
  group()->startCoalescing(device.type());
  start(parcels);
  if (const Work work = group()->endCoalescing(device.type())) {
    work->wait();
  }
}

}  // namespace torchext
