// Lets code that knows no Python run a blocking stretch without Python's interpreter lock (the GIL).
//
// A backend is often destroyed by Python's garbage collector, that is with the lock held; joining a thread whose
// callbacks need the lock would then hang. The bindings install a function that releases the lock where the caller
// holds it.
#pragma once

#include <functional>

namespace torchext {

using InterpreterLockReleaser = void (*)(const std::function<void()>& body);

// Called once, by the bindings. Without it the body simply runs.
void setInterpreterLockReleaser(InterpreterLockReleaser releaser) noexcept;

// Runs `body` with the lock released if this thread holds it. Exceptions of `body` pass through.
void withoutInterpreterLock(const std::function<void()>& body);

}  // namespace torchext
