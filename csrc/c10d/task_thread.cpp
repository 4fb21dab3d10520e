#include "c10d/task_thread.h"

#include <utility>

#include <c10/util/thread_name.h>

namespace torchext {

TaskThread::TaskThread(std::string name) : name_(std::move(name)), thread_([this] { loop(); }) {}

TaskThread::~TaskThread() { discard(); }

bool TaskThread::post(std::function<void()> task) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) {
      return false;
    }
    queue_.push_back(std::move(task));
  }
  changed_.notify_all();
  return true;
}

bool TaskThread::finish(std::chrono::milliseconds limit) {
  std::unique_lock<std::mutex> lock(mutex_);
  closed_ = true;
  return changed_.wait_for(lock, limit, [this] { return queue_.empty() && !running_; });
}

void TaskThread::discard() {
  std::deque<std::function<void()>> dropped;  // destroyed outside the lock: a task may own what posts to us
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    dropped.swap(queue_);
  }
  changed_.notify_all();
  if (thread_.joinable() && thread_.get_id() != std::this_thread::get_id()) {
    thread_.join();
  }
}

void TaskThread::loop() {
  c10::setThreadName(name_);
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return closed_ || !queue_.empty(); });
    if (queue_.empty()) {
      return;
    }
    std::function<void()> task = std::move(queue_.front());
    queue_.pop_front();
    running_ = true;
    lock.unlock();
    task();
    task = nullptr;
    lock.lock();
    running_ = false;
    changed_.notify_all();
  }
}

}  // namespace torchext
