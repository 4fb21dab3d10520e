#include "c10d/threads/task_thread.h"

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <utility>

#include "c10d/threads/start_thread.h"

namespace torchext {

// Shared with the thread, which outlives the object that one of its tasks destroys.
struct TaskThread::State {
  explicit State(std::string thread_name) : name(std::move(thread_name)) {}
  void loop();
  void awaitTask(std::unique_lock<std::mutex>& lock);

  const std::string name;
  std::mutex mutex;  // guards what follows
  std::condition_variable changed;
  std::deque<std::function<void()>> queue;
  std::function<void()> idle;  // empty: none
  std::chrono::milliseconds idle_span{0};
  std::uint64_t idle_number = 0;  // of calls of whenIdle()
  bool running = false;
  bool closed = false;
};

TaskThread::TaskThread(std::string name)
    : state_(std::make_shared<State>(std::move(name))),
      thread_(startThread(state_->name, [state = state_] { state->loop(); })) {}

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

void TaskThread::whenIdle(std::chrono::milliseconds span, std::function<void()> task) {
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->idle.swap(task);  // the former one is destroyed outside the lock
    state_->idle_span = span;
    ++state_->idle_number;
  }
  state_->changed.notify_all();
}

bool TaskThread::finish(std::chrono::milliseconds limit) {
  std::unique_lock<std::mutex> lock(state_->mutex);
  state_->closed = true;
  return state_->changed.wait_for(lock, limit, [this] { return state_->queue.empty() && !state_->running; });
}

void TaskThread::discard() {
  std::deque<std::function<void()>> dropped;  // destroyed outside the lock: a task may own what posts to us
  std::function<void()> idle;
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->closed = true;
    dropped.swap(state_->queue);
    idle.swap(state_->idle);
  }
  state_->changed.notify_all();
  if (thread_.joinable() && thread_.get_id() != std::this_thread::get_id()) {
    thread_.join();
  }
}

void TaskThread::State::loop() {
  std::unique_lock<std::mutex> lock(mutex);
  while (true) {
    awaitTask(lock);
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

// Until there is one, or the end.
void TaskThread::State::awaitTask(std::unique_lock<std::mutex>& lock) {
  while (!closed && queue.empty()) {
    const std::uint64_t number = idle_number;
    const auto other = [this, number] { return closed || !queue.empty() || idle_number != number; };
    if (!idle) {
      changed.wait(lock, other);
    } else if (!changed.wait_for(lock, idle_span, other)) {
      queue.push_back(std::exchange(idle, nullptr));
    }
  }
}

}  // namespace torchext
