#include "kfac/factors/ready_clock.h"

#include <algorithm>

#include <c10/core/impl/VirtualGuardImpl.h>

#include "kfac/base/scoped_timer.h"

namespace torchext {

ReadyClock::ReadyClock(c10::Device device, std::size_t places)
    : device_(device), seconds_(places, 0.0), events_(device.is_cpu() ? 0 : places) {}

c10::Event ReadyClock::eventNow() const {
  c10::Event event(device_.type(), c10::EventFlag::BACKEND_DEFAULT);  // the flag of events that can be timed
  event.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  return event;
}

void ReadyClock::start() {
  if (started_) {
    return;
  }
  started_ = true;
  if (device_.is_cpu()) {
    start_ = monotonicSeconds();
  } else {
    start_event_.emplace(eventNow());
    for (auto& event : events_) {
      event.reset();
    }
  }
}

void ReadyClock::mark(std::size_t place) {
  if (device_.is_cpu()) {
    seconds_[place] = monotonicSeconds() - start_;
  } else {
    events_[place].emplace(eventNow());
  }
}

void ReadyClock::restart() { started_ = false; }

std::vector<double> ReadyClock::seconds() {
  constexpr double kMilliseconds = 1e-3;
  for (std::size_t place = 0; place < events_.size(); ++place) {
    if (events_[place]) {
      start_event_->synchronize();
      events_[place]->synchronize();
      seconds_[place] = kMilliseconds * std::max(start_event_->elapsedTime(*events_[place]), 0.0);
    }
  }
  return seconds_;
}

}  // namespace torchext
