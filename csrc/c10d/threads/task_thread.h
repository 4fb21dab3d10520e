// TaskThread: one thread, one queue, two exits.
//
// Tasks run in the order posted, on one thread of ours, never under the GIL. A task handles its own errors: one that
// lets an exception escape is a bug and ends the process with a message (it would otherwise be lost).
// Exits: finish(limit) lets the queue run dry, at most `limit`; discard() drops what has not started. Both are safe
// twice and from any thread; neither interrupts a running task - whoever owns the task's waits does that. A task that
// discards or destroys the object it runs on goes on to its own end, and the thread with it.
// whenIdle(): one task for later, should nothing else come meanwhile.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>

namespace torchext {

class TaskThread {
 public:
  explicit TaskThread(std::string name);
  ~TaskThread();  // discard()
  TaskThread(const TaskThread&) = delete;
  TaskThread& operator=(const TaskThread&) = delete;

  // False (and the task is dropped) after finish() or discard().
  bool post(std::function<void()> task);
  // Posts the task once the thread has had nothing to do for `span`, unless this is called again before. Neither
  // finish() nor discard() waits for that.
  void whenIdle(std::chrono::milliseconds span, std::function<void()> task);
  // True when the queue was empty and no task running within the limit.
  bool finish(std::chrono::milliseconds limit);
  void discard();

 private:
  struct State;
  const std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace torchext
