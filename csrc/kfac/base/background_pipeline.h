// BackgroundPipeline: what one thread makes of things that are on their way, for an owner who may drop it all.
//
// The owner says, once a step, what to wait for and which results are made of it, by key (follow()). It asks for them
// later: use() waits only for what is not made yet. A step's end() drops its results unseen and returns when the thread
// is at rest, so that the memory it reads may be written again. What throws on the thread, is thrown by every call that
// needs it, or what comes after it, up to end(); what was made before stays.
//
// Threads: work() is the body of one thread, which has all calls of Run; the owner's calls under a lock of its own.
// Waits of the owner look up for signals (interruptible_wait.h), or do what they are given for it. No torch: it is run
// under ThreadSanitizer as it is.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "c10d/threads/interruptible_wait.h"

namespace torchext {

template <class Result>
class BackgroundPipeline {
 public:
  struct Run {
    std::function<void()> wait;               // until all of it is here; throws where it will not come
    std::vector<std::size_t> keys;            // of the results, in the order in which they are made
    std::function<Result(std::size_t)> make;  // of a key
  };

  // look: what a wait of the owner calls now and then; what it throws ends the wait.
  explicit BackgroundPipeline(std::function<void()> look = &checkSignals) : look_(std::move(look)) {}

  // Until close(): what a call of Run is busy with then comes to its end first.
  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return closed_ || run_; });
      if (closed_) {
        return;
      }
      working_ = true;
      std::optional<Run> run = std::exchange(run_, std::nullopt);
      makeAll(*run, lock);
      // Whatever it holds goes without the lock, and before the thread is at rest.
      lock.unlock();
      run.reset();
      lock.lock();
      working_ = false;
      changed_.notify_all();
    }
  }
  void close() {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    changed_.notify_all();
  }

  // The step's run. end() comes before the next one. Never blocks.
  void follow(Run run) {
    const std::lock_guard lock(mutex_);
    run_ = std::move(run);
    dropped_ = false;
    changed_.notify_all();
  }
  // Calls use(result) under the lock, and returns what it returns. The result stays: a step that was interrupted here
  // may be taken again. key: of the run that was followed in this step.
  template <class Use>
  auto use(std::size_t key, Use use) {
    std::unique_lock lock(mutex_);
    wait(lock, [&] { return made_.contains(key) || error_; });
    const auto found = made_.find(key);
    if (found == made_.end()) {
      std::rethrow_exception(error_);
    }
    return use(found->second);
  }
  void end() {
    std::unique_lock lock(mutex_);
    dropped_ = true;
    made_.clear();
    error_ = nullptr;
    wait(lock, [&] { return !run_ && !working_; });
  }

 private:
  template <class Ready>
  void wait(std::unique_lock<std::mutex>& lock, Ready ready) {
    while (!changed_.wait_for(lock, kSignalCheckInterval, ready)) {
      lock.unlock();
      look_();
      lock.lock();
    }
  }

  // A run that was dropped is waited for all the same: its memory is used again.
  void makeAll(const Run& run, std::unique_lock<std::mutex>& lock) {
    if (!attempt(run.wait, lock)) {
      return;
    }
    for (const std::size_t key : run.keys) {
      std::optional<Result> result;
      if (!attempt([&] { result = run.make(key); }, lock)) {
        return;
      }
      made_.insert_or_assign(key, std::move(*result));
      changed_.notify_all();
    }
  }

  // Calls it without the lock. Whether the run goes on.
  template <class Call>
  bool attempt(const Call& call, std::unique_lock<std::mutex>& lock) {
    std::exception_ptr error;
    lock.unlock();
    try {
      call();
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    if (dropped_ || closed_) {
      return false;
    }
    error_ = error;
    changed_.notify_all();
    return !error;
  }

  const std::function<void()> look_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::optional<Run> run_;  // which the thread has not begun
  bool working_ = false;
  bool closed_ = false;
  bool dropped_ = false;  // the run that the thread has, or will
  std::map<std::size_t, Result> made_;
  std::exception_ptr error_;  // of what could not be made
};

}  // namespace torchext
