#include "c10d/threads/interruptible_wait.h"

#include <atomic>

namespace torchext {
namespace {
std::atomic<void (*)()> signal_checker{nullptr};
}  // namespace

void setSignalChecker(void (*checker)()) noexcept { signal_checker.store(checker); }

void checkSignals() {
  if (auto* checker = signal_checker.load()) {
    checker();
  }
}

}  // namespace torchext
