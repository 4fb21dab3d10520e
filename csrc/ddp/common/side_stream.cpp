#include "ddp/common/side_stream.h"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace torchext {

SideStream::SideStream(c10::Device device) : device_(device) {
  if (!device.is_cpu()) {
    stream_ = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/true);
  }
}

c10::OptionalStreamGuard SideStream::enter() const { return c10::OptionalStreamGuard(stream_); }

SideStream::Mark SideStream::mark() const {
  if (!stream_) {
    return nullptr;
  }
  auto event = std::make_shared<c10::Event>(device_.type());
  event->record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  return event;
}

void SideStream::after(const Mark& mark) const {
  if (mark) {
    mark->block(*stream_);
  }
}

void SideStream::synchronize() const {
  if (stream_) {
    stream_->synchronize();
  }
}

void synchronizeDevice(c10::Device device) {
  if (!device.is_cpu()) {
    c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
  }
}

}  // namespace torchext
