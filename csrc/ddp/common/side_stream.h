// SideStream: a CUDA stream of a background thread's own; on the CPU, where work is done when it returns, nothing.
//
// The thread queues on it while enter()'s guard lives. What other threads have queued is waited for on the device, what
// the thread has queued is waited for by the thread before it tells anybody.
#pragma once

#include <memory>
#include <optional>

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

namespace torchext {

class SideStream {
 public:
  using Mark = std::shared_ptr<c10::Event>;

  explicit SideStream(c10::Device device);

  // For the background thread: makes this its current stream.
  c10::OptionalStreamGuard enter() const;
  // The end of what the calling thread has queued on its current stream; null on the CPU. From any thread.
  Mark mark() const;
  // What is queued here from now on comes after the mark.
  void after(const Mark& mark) const;
  // Blocks the calling thread until all that was queued here is done.
  void synchronize() const;

 private:
  c10::Device device_;
  std::optional<c10::Stream> stream_;
};

// Blocks the calling thread until all that was queued on the device is done, on whatever stream; nothing on the CPU.
void synchronizeDevice(c10::Device device);

}  // namespace torchext
