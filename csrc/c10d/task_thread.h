// TaskThread: one thread, one queue, two exits.
//
// Tasks run in the order posted, on one thread of ours, never under the GIL. A task handles its own errors: one that
// lets an exception escape is a bug and ends the process with a message (it would otherwise be lost).
// Exits: finish(limit) lets the queue run dry, at most `limit`; discard() drops what has not started. Both are safe
// twice and from any thread but its own; neither interrupts a running task - whoever owns the task's waits does that.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
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
  // True when the queue was empty and no task running within the limit.
  bool finish(std::chrono::milliseconds limit);
  void discard();

 private:
  void loop();

  const std::string name_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool running_ = false;
  bool closed_ = false;
  std::thread thread_;
};

}  // namespace torchext
