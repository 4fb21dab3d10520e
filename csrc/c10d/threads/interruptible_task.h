// runInterruptibly() runs work that blocks on a thread of its own, while the caller's thread looks for signals.
//
// For calls of others that block and cannot be asked to look (a receive of Gloo). The caller waits as in
// interruptible_wait.h.
#pragma once

#include <functional>
#include <string>

namespace torchext {

// Returns when `body` has, and throws what it throws. What a signal's handler raises is thrown instead: before that,
// `cancel` is called, which is to end what the body waits for. A body that goes on for more than two seconds after it
// is left to itself: it must own all it uses.
// name: of the thread, 15 characters at most. Without the interpreter lock.
void runInterruptibly(const std::string& name, std::function<void()> body, const std::function<void()>& cancel);

}  // namespace torchext
