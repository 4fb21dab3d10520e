#include "c10d/fault/failure_callbacks.h"

#include <algorithm>

namespace torchext {

std::uint64_t FailureCallbacks::add(std::function<void()> callback) {
  {
    const std::lock_guard lock(mutex_);
    // The reason is set before run() takes the lock: a callback that is added here is found there.
    if (!reason_.isSet()) {
      callbacks_.emplace_back(next_, std::move(callback));
      return next_++;
    }
  }
  callback();
  return 0;
}

void FailureCallbacks::remove(std::uint64_t id) {
  decltype(callbacks_) removed;  // what they captured may end with them, without the lock
  std::unique_lock lock(mutex_);
  const auto found =
      std::find_if(callbacks_.begin(), callbacks_.end(), [id](const auto& entry) { return entry.first == id; });
  if (found != callbacks_.end()) {
    removed.splice(removed.end(), callbacks_, found);
  }
  // What it captured goes with the caller.
  changed_.wait(lock, [&] {
    const auto running = running_.find(id);
    return running == running_.end() || running->second == std::this_thread::get_id();
  });
}

void FailureCallbacks::setConnectionCloser(std::function<void()> closer) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !closing_; });
  closeConnections_ = std::move(closer);
}

void FailureCallbacks::run() {
  std::unique_lock lock(mutex_);
  while (!callbacks_.empty()) {
    auto [id, callback] = std::move(callbacks_.front());
    callbacks_.pop_front();
    running_.emplace(id, std::this_thread::get_id());
    lock.unlock();
    callback();
    callback = nullptr;  // what it captured may end with it
    lock.lock();
    running_.erase(id);
    changed_.notify_all();
  }
  // Taken only now: shutdown waits for who has taken it, and may be called by what has just run.
  const auto closer = std::exchange(closeConnections_, nullptr);
  if (!closer) {
    return;
  }
  closing_ = true;
  lock.unlock();
  closer();
  lock.lock();
  closing_ = false;
  changed_.notify_all();
}

}  // namespace torchext
