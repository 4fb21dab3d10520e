// CallbackThreads: runs the callbacks that scripts add to the futures of a group's calls.
//
// Why on threads of their own
//   A callback may make another call and wait for it, as torch's PowerSGD hook does. On a thread of Gloo, of the call
//   check or of the monitor it would wait for what this very thread must do. So no call needs these threads.
//
// How
//   Tasks start in the order posted, each when the one before has ended. A callback that waits for something behind it
//   in the queue must not stop the queue, and nobody sees it wait. So a task starts earlier
//     * at once where it belongs to a call that a callback has made: that callback most likely waits for it;
//     * else when the task before has run for kPatience, times the tasks that run.
//   One thread is always free to do so: the thread that takes a task starts another where none is.
//
// Threads: everything from any thread; post() never blocks. The threads start when first needed, are `most` at most,
// and end in finish(). They own what they use, so that a callback that never returns keeps nobody but itself.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>

namespace torchext {

class CallbackThreads {
 public:
  // Callbacks that can be blocked at a time.
  static constexpr std::size_t kMost = 256;
  static constexpr std::chrono::milliseconds kPatience{5};

  // full: called once, when tasks wait because `most` threads are busy; must not block.
  explicit CallbackThreads(std::function<void()> full = {}, std::size_t most = kMost,
                           std::chrono::milliseconds patience = kPatience);
  ~CallbackThreads();  // leaves busy threads to themselves
  CallbackThreads(const CallbackThreads&) = delete;
  CallbackThreads& operator=(const CallbackThreads&) = delete;

  // nested: of a call that was made while here(). A task must not throw.
  // False after finish(), or where the system gives no thread at all: then the caller runs the task.
  bool post(const std::function<void()>& task, bool nested);
  // Whether this thread runs a task, of whichever object.
  static bool here() noexcept;
  // Takes no more tasks, and waits until those it has are done, but for one that calls this; `limit` at most. True
  // when they are: then the threads have ended. Safe twice. Never to be called with the interpreter lock held.
  bool finish(std::chrono::milliseconds limit) noexcept;
  // In a forked child, where the threads do not exist.
  void abandon() noexcept;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace torchext
