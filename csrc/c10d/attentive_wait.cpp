#include "c10d/attentive_wait.h"

#include <atomic>

namespace torchext {
namespace {
std::atomic<void (*)()> registered{nullptr};
}  // namespace

void setSignalAttendant(void (*attendant)()) noexcept { registered.store(attendant); }

void attendToSignals() {
  if (auto* attendant = registered.load()) {
    attendant();
  }
}

}  // namespace torchext
