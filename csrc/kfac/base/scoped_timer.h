// ScopedTimer adds up seconds of the host. On an accelerator a block is over when its work is queued.
#pragma once

#include <chrono>

#include <c10/core/Device.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace torchext {

inline double monotonicSeconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Until what is queued on the current stream of an accelerator has run, so that a clock tells its time.
inline void waitForDevice(c10::Device device) {
  if (!device.is_cpu()) {
    c10::impl::VirtualGuardImpl(device.type()).getStream(device).synchronize();
  }
}

// Adds the seconds of a block to a sum.
class ScopedTimer {
 public:
  explicit ScopedTimer(double& sum) : sum_(sum), start_(monotonicSeconds()) {}
  ScopedTimer(const ScopedTimer&) = delete;
  ScopedTimer& operator=(const ScopedTimer&) = delete;
  ~ScopedTimer() { sum_ += monotonicSeconds() - start_; }

 private:
  double& sum_;
  double start_;
};

}  // namespace torchext
