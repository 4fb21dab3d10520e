#include "c10d/task_thread.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <utility>

#include <c10/util/thread_name.h>

namespace torchext {

// Shared with the thread, which outlives the object that one of its tasks destroys.
struct TaskThread::State {
  explicit State(std::string thread_name) : name(std::move(thread_name)) {}
  void loop();

  const std::string name;
  std::mutex mutex;  // guards what follows
  std::condition_variable changed;
  std::deque<std::function<void()>> queue;
  bool running = false;
  bool closed = false;
};

TaskThread::TaskThread(std::string name)
    : state_(std::make_shared<State>(std::move(name))), thread_([state = state_] { state->loop(); }) {}

TaskThread::~TaskThread() {
  discard();
  if (thread_.joinable()) {  // by a task of its own
    thread_.detach();
  }
}

bool TaskThread::post(std::function<void()> task) {
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    if (state_->closed) {
      return false;
    }
    state_->queue.push_back(std::move(task));
  }
  state_->changed.notify_all();
  return true;
}

bool TaskThread::finish(std::chrono::milliseconds limit) {
  std::unique_lock<std::mutex> lock(state_->mutex);
  state_->closed = true;
  return state_->changed.wait_for(lock, limit, [this] { return state_->queue.empty() && !state_->running; });
}

void TaskThread::discard() {
  std::deque<std::function<void()>> dropped;  // destroyed outside the lock: a task may own what posts to us
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->closed = true;
    dropped.swap(state_->queue);
  }
  state_->changed.notify_all();
  if (thread_.joinable() && thread_.get_id() != std::this_thread::get_id()) {
    thread_.join();
  }
}

void TaskThread::State::loop() {
  c10::setThreadName(name);
  std::unique_lock<std::mutex> lock(mutex);
  while (true) {
    changed.wait(lock, [this] { return closed || !queue.empty(); });
    if (queue.empty()) {
      return;
    }
    std::function<void()> task = std::move(queue.front());
    queue.pop_front();
    running = true;
    lock.unlock();
    task();
    task = nullptr;
    lock.lock();
    running = false;
    changed.notify_all();
  }
}

}  // namespace torchext
