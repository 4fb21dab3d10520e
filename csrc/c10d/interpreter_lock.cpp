#include "c10d/interpreter_lock.h"

#include <atomic>

namespace torchext {
namespace {
std::atomic<InterpreterLockReleaser> registered{nullptr};
}  // namespace

void setInterpreterLockReleaser(InterpreterLockReleaser releaser) noexcept { registered.store(releaser); }

void withoutInterpreterLock(const std::function<void()>& body) {
  if (auto* releaser = registered.load()) {
    releaser(body);
  } else {
    body();
  }
}

}  // namespace torchext
