#include "c10d/threads/callback_threads.h"

#include <pthread.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace torchext {

struct CallbackThreads::State : std::enable_shared_from_this<State> {
  using Clock = std::chrono::steady_clock;
  using Lock = std::unique_lock<std::mutex>;

  State(std::function<void()> when_full, std::size_t most_threads, std::chrono::milliseconds patience_in)
      : full(std::move(when_full)), most(most_threads), patience(patience_in) {}

  bool start();
  bool await(Lock& lock);
  void loop();
  bool empty() const { return nested.empty() && ordinary.empty(); }

  const std::function<void()> full;
  const std::size_t most;
  const std::chrono::milliseconds patience;

  std::mutex mutex;                 // guards what follows
  std::condition_variable changed;  // of the threads that are free
  std::condition_variable ended;    // of finish()
  std::deque<std::function<void()>> nested;
  std::deque<std::function<void()>> ordinary;
  std::vector<std::thread> threads;
  std::size_t free = 0;  // threads that wait for a task, or are about to
  std::size_t busy = 0;
  std::size_t turn = 0;  // the number of the ordinary task that runs; 0: the next may start
  std::size_t turns = 0;
  Clock::time_point turn_since;
  bool closed = false;
  bool told = false;  // `full` has been called
};

namespace {
thread_local const void* current = nullptr;  // the State whose task this thread runs
}  // namespace

// With the mutex held: whether there is one more thread.
bool CallbackThreads::State::start() {
  if (threads.size() >= most) {
    return false;
  }
  try {
    threads.emplace_back([state = shared_from_this()] { state->loop(); });
  } catch (const std::system_error&) {
    return false;  // the threads that there are go on
  }
  ++free;
  return true;
}

// Until this thread is to take a task. False: there will be none.
bool CallbackThreads::State::await(Lock& lock) {
  while (nested.empty()) {
    if (ordinary.empty()) {
      if (closed) {
        return false;
      }
      changed.wait(lock);
      continue;
    }
    const auto due = turn_since + patience * busy;
    if (turn == 0 || Clock::now() >= due) {
      break;
    }
    changed.wait_until(lock, due);
  }
  return true;
}

void CallbackThreads::State::loop() {
  pthread_setname_np(pthread_self(), "tx_callbacks");
  Lock lock(mutex);
  while (await(lock)) {
    std::size_t own_turn = 0;
    auto& queue = nested.empty() ? ordinary : nested;
    if (nested.empty()) {
      turn = own_turn = ++turns;
      turn_since = Clock::now();
    }
    std::function<void()> task = std::move(queue.front());
    queue.pop_front();
    --free;
    ++busy;
    if (!empty() && (free > 0 || !start())) {
      changed.notify_one();  // who watches over the rest may have gone to sleep when there was none
    }
    lock.unlock();
    current = this;
    task();
    task = nullptr;  // what it owned goes before anybody hears that it has ended
    current = nullptr;
    lock.lock();
    ++free;
    --busy;
    if (turn == own_turn) {
      turn = 0;
    }
    ended.notify_all();
  }
  --free;
}

CallbackThreads::CallbackThreads(std::function<void()> full, std::size_t most, std::chrono::milliseconds patience)
    : state_(std::make_shared<State>(std::move(full), most, patience)) {}

CallbackThreads::~CallbackThreads() {
  if (!state_ || finish(std::chrono::milliseconds(0))) {
    return;
  }
  const std::lock_guard lock(state_->mutex);
  for (std::thread& thread : state_->threads) {
    thread.detach();
  }
  state_->threads.clear();
}

bool CallbackThreads::post(const std::function<void()>& task, bool nested) {
  if (!state_) {
    return false;
  }
  bool full = false;
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->closed) {
      return false;
    }
    auto& queue = nested ? state_->nested : state_->ordinary;
    queue.push_back(task);
    // A free thread for each nested task, and one more that watches over the others.
    if (state_->free < state_->nested.size() + (state_->ordinary.empty() ? 0 : 1) && !state_->start()) {
      if (state_->threads.empty()) {
        queue.pop_back();
        return false;
      }
      full = state_->free == 0 && state_->threads.size() == state_->most && !std::exchange(state_->told, true);
    }
    state_->changed.notify_one();
  }
  if (full && state_->full) {
    state_->full();
  }
  return true;
}

bool CallbackThreads::here() noexcept { return current != nullptr; }

bool CallbackThreads::finish(std::chrono::milliseconds limit) noexcept {
  if (!state_) {
    return true;
  }
  std::vector<std::thread> threads;
  {
    std::unique_lock lock(state_->mutex);
    state_->closed = true;
    state_->changed.notify_all();
    const std::size_t own = current == state_.get() ? 1 : 0;
    if (!state_->ended.wait_for(lock, limit, [&] { return state_->empty() && state_->busy <= own; })) {
      return false;
    }
    threads.swap(state_->threads);
    state_->changed.notify_all();  // those that watched over the last tasks
  }
  for (std::thread& thread : threads) {
    thread.get_id() == std::this_thread::get_id() ? thread.detach() : thread.join();
  }
  return true;
}

void CallbackThreads::abandon() noexcept {
  // Deliberately leaked: neither the threads nor the locks mean anything in a forked child.
  static_cast<void>(new (std::nothrow) std::shared_ptr<State>(std::move(state_)));
}

}  // namespace torchext
