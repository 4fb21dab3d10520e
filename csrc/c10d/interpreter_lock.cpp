#include "c10d/interpreter_lock.h"

#include <atomic>

namespace torchext {
namespace {
std::atomic<InterpreterLockReleaser> releaser_{nullptr};
}  // namespace

void setInterpreterLockReleaser(InterpreterLockReleaser releaser) noexcept { releaser_.store(releaser); }

void withoutInterpreterLock(const std::function<void()>& body) {
  if (auto* releaser = releaser_.load()) {
    releaser(body);
  } else {
    body();
  }
}

}  // namespace torchext
