// BoundedThread: a thread whose end is waited for only so long.
//
// For threads that run callbacks of others, which may be stuck. The body must own all it uses (by shared_ptr): where it
// does not end in time it is left to itself.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>

namespace torchext {

class BoundedThread {
 public:
  BoundedThread() = default;
  BoundedThread(const std::string& name, std::function<void()> body);
  ~BoundedThread();  // finish(0)
  BoundedThread(BoundedThread&&) = default;
  BoundedThread& operator=(BoundedThread&&) = default;

  // Waits until the body has ended, at most `limit`; not at all for itself. Then no thread belongs to this object any
  // more. True if the body had ended, or none was started.
  bool finish(std::chrono::milliseconds limit) noexcept;
  // In a forked child, where the thread does not exist.
  void abandon() noexcept { static_cast<void>(thread_.release()); }

 private:
  struct End;
  std::shared_ptr<End> end_;
  std::unique_ptr<std::thread> thread_;
};

}  // namespace torchext
