// BackgroundPipeline: what one thread makes of things that arrive in order, for an owner who may drop it all.
//
// The owner says what is on its way (follow()), which results are made of each, by key, and asks for them later: use()
// waits only for what is not made yet. A step's end() drops its results unseen and returns when the thread is at rest,
// so that the memory it reads may be written again. What throws on the thread, is thrown by every call that needs it,
// or what comes after it, up to end(); what was made before stays.
//
// Threads: work() is the body of one thread, which has all calls of Run; the owner's calls under a lock of its own.
// Waits of the owner look up for signals (interruptible_wait.h), or do what they are given for it. No torch: it is run
// under ThreadSanitizer as it is.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
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
    std::function<void()> wait;               // until it is here; throws where it will not come
    std::vector<std::size_t> keys;            // of the results, in the order in which they are made
    std::function<Result(std::size_t)> make;  // of a key
  };

  // look: what a wait of the owner calls now and then; what it throws ends the wait.
  explicit BackgroundPipeline(std::function<void()> look = &checkSignals) : look_(std::move(look)) {}

  // Until close(): what a call of Run is busy with then comes to its end first.
  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      working_ = false;
      changed_.notify_all();
      changed_.wait(lock, [this] { return closed_ || !queue_.empty(); });
      if (closed_) {
        return;
      }
      working_ = true;
      Queued next = std::move(queue_.front());
      queue_.pop_front();
      await(next, lock);
      if (!lost_ && !failed_) {
        makeAll(next, lock);
      }
      // Whatever it holds goes without the lock, and before the thread is at rest.
      lock.unlock();
      next = {};
      lock.lock();
    }
  }
  void close() {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    changed_.notify_all();
  }

  // The step's next run. Never blocks.
  void follow(Run run) {
    const std::lock_guard lock(mutex_);
    queue_.push_back({step_, std::move(run)});
    ++followed_;
    changed_.notify_all();
  }
  std::size_t followed() const {
    const std::lock_guard lock(mutex_);
    return followed_;
  }
  // Until the step's first `runs` are here.
  void waitForRuns(std::size_t runs) {
    std::unique_lock lock(mutex_);
    wait(lock, [&] { return come_ >= runs || lost_; });
    if (come_ < runs) {
      std::rethrow_exception(lost_);
    }
  }
  // Calls use(result) under the lock, and returns what it returns. The result stays: a step that was interrupted here
  // may be taken again. key: of a run that was followed in this step.
  template <class Use>
  auto use(std::size_t key, Use use) {
    std::unique_lock lock(mutex_);
    wait(lock, [&] { return made_.contains(key) || lost_ || failed_; });
    const auto found = made_.find(key);
    if (found == made_.end()) {
      std::rethrow_exception(failed_ ? failed_ : lost_);
    }
    return use(found->second);
  }
  void end() {
    std::unique_lock lock(mutex_);
    ++step_;
    followed_ = 0;
    come_ = 0;
    made_.clear();
    lost_ = nullptr;
    failed_ = nullptr;
    wait(lock, [&] { return queue_.empty() && !working_; });
  }

 private:
  struct Queued {
    std::size_t step = 0;
    Run run;
  };
  template <class Ready>
  void wait(std::unique_lock<std::mutex>& lock, Ready ready) {
    while (!changed_.wait_for(lock, kSignalCheckInterval, ready)) {
      lock.unlock();
      look_();
      lock.lock();
    }
  }
  bool wanted(const Queued& queued) const { return queued.step == step_ && !closed_; }

  // A step's later runs are waited for whatever has happened: their memory is used again.
  void await(const Queued& queued, std::unique_lock<std::mutex>& lock) {
    std::exception_ptr error;
    lock.unlock();
    try {
      queued.run.wait();
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    if (wanted(queued)) {
      lost_ = error ? error : lost_;
      come_ += lost_ ? 0 : 1;
      changed_.notify_all();
    }
  }

  void makeAll(const Queued& queued, std::unique_lock<std::mutex>& lock) {
    for (const std::size_t key : queued.run.keys) {
      if (!wanted(queued)) {
        return;
      }
      std::optional<Result> result;
      std::exception_ptr error;
      lock.unlock();
      try {
        result = queued.run.make(key);
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      if (!wanted(queued)) {
        return;
      }
      if (error) {
        failed_ = error;
      } else {
        made_.insert_or_assign(key, std::move(*result));
      }
      changed_.notify_all();
      if (error) {
        return;
      }
    }
  }

  const std::function<void()> look_;
  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::deque<Queued> queue_;
  bool working_ = false;
  bool closed_ = false;
  std::size_t step_ = 0;  // what follows is of this one
  std::size_t followed_ = 0;
  std::size_t come_ = 0;
  std::map<std::size_t, Result> made_;
  std::exception_ptr lost_;    // a run did not come
  std::exception_ptr failed_;  // a result could not be made
};

}  // namespace torchext
