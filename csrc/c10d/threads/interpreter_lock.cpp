#include "c10d/threads/interpreter_lock.h"

#include <atomic>

namespace torchext {
namespace {
std::atomic<InterpreterLockReleaser> lock_releaser{nullptr};
}  // namespace

void setInterpreterLockReleaser(InterpreterLockReleaser releaser) noexcept { lock_releaser.store(releaser); }

void withoutInterpreterLock(const std::function<void()>& body) {
  if (auto* releaser = lock_releaser.load()) {
    releaser(body);
  } else {
    body();
  }
}

}  // namespace torchext
