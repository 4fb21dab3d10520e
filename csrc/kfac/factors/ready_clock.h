// When the factors of a step became ready, counted from its first hook: by the host's clock, or on an accelerator,
// where the host only queues work, by events in its streams. Not thread-safe.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/Event.h>

namespace torchext {

class ReadyClock {
 public:
  ReadyClock(c10::Device device, std::size_t places);
  // Time zero, unless it has been since restart().
  void start();
  void mark(std::size_t place);
  void restart();
  // [place] seconds of the last mark() of each, 0: never. Waits for the events.
  std::vector<double> seconds();

 private:
  c10::Event eventNow() const;

  c10::Device device_;
  bool started_ = false;
  double start_ = 0;
  std::vector<double> seconds_;
  std::optional<c10::Event> start_event_;
  std::vector<std::optional<c10::Event>> events_;  // [place] of this step
};

}  // namespace torchext
