#include "c10d/threads/attentive_wait.h"

#include <atomic>

namespace torchext {
namespace {
std::atomic<void (*)()> signal_attendant{nullptr};
}  // namespace

void setSignalAttendant(void (*attendant)()) noexcept { signal_attendant.store(attendant); }

void attendToSignals() {
  if (auto* attendant = signal_attendant.load()) {
    attendant();
  }
}

}  // namespace torchext
