#include "c10d/threads/bounded_thread.h"

#include <condition_variable>
#include <mutex>
#include <utility>

#include "c10d/threads/start_thread.h"

namespace torchext {

struct BoundedThread::End {
  std::mutex mutex;
  std::condition_variable changed;
  bool reached = false;
};

BoundedThread::BoundedThread(const std::string& name, std::function<void()> body)
    : end_(std::make_shared<End>()),
      thread_(std::make_unique<std::thread>(startThread(name, [end = end_, body = std::move(body)]() mutable {
        body();
        body = nullptr;  // what it owned goes before anybody hears that it has ended
        std::lock_guard lock(end->mutex);
        end->reached = true;
        end->changed.notify_all();
      }))) {}

BoundedThread::~BoundedThread() { finish(std::chrono::milliseconds(0)); }

bool BoundedThread::finish(std::chrono::milliseconds limit) noexcept {
  if (!thread_) {
    return true;
  }
  bool ended = false;
  if (thread_->get_id() != std::this_thread::get_id()) {
    std::unique_lock lock(end_->mutex);
    ended = end_->changed.wait_for(lock, limit, [this] { return end_->reached; });
  }
  if (ended) {
    thread_->join();
  } else {
    thread_->detach();
  }
  thread_.reset();
  return ended;
}

}  // namespace torchext
