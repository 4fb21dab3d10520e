#include "optim/early_inverses.h"

#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <new>
#include <utility>

#include <ATen/Parallel.h>

#include "c10d/attentive_wait.h"
#include "optim/plain_mode.h"

namespace torchext {

struct EarlyInverses::State {
  struct Run {
    std::size_t step = 0;
    KfacExchange::Sum sum;
    std::vector<std::size_t> slots;
    FactorInverter inverter;
    double damping = 0;
  };
  struct Made {
    FactorInverse inverse;
    InverseFailures failures;
  };
  void loop();
  void await(Run& run, std::unique_lock<std::mutex>& lock);
  void invert(const Run& run, std::unique_lock<std::mutex>& lock);
  bool wanted(const Run& run) const { return run.step == step && !closed; }

  std::mutex mutex;  // guards what follows
  std::condition_variable changed;
  std::deque<Run> queue;
  bool working = false;
  bool closed = false;
  std::size_t step = 0;  // what follows is of this one
  std::size_t followed = 0;
  std::size_t come = 0;
  std::map<std::size_t, Made> made;  // by slot
  std::exception_ptr lost;           // a run did not come
  std::exception_ptr failed;         // an inversion threw
};

void EarlyInverses::State::loop() {
  at::init_num_threads();  // as many as the script has chosen
  const PlainMode plain;
  std::unique_lock lock(mutex);
  while (true) {
    working = false;
    changed.notify_all();
    changed.wait(lock, [this] { return closed || !queue.empty(); });
    if (closed) {
      return;
    }
    working = true;
    Run run = std::move(queue.front());
    queue.pop_front();
    await(run, lock);
    if (!lost && !failed) {
      invert(run, lock);
    }
  }
}

// A step's later runs are waited for whatever has happened: their memory is used again.
void EarlyInverses::State::await(Run& run, std::unique_lock<std::mutex>& lock) {
  std::exception_ptr error;
  lock.unlock();
  try {
    run.sum.wait();
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  if (wanted(run)) {
    lost = error ? error : lost;
    come += lost ? 0 : 1;
    changed.notify_all();
  }
}

void EarlyInverses::State::invert(const Run& run, std::unique_lock<std::mutex>& lock) {
  const FactorInverter& inverter = run.inverter;
  for (const std::size_t slot : run.slots) {
    if (!wanted(run)) {
      return;
    }
    Made result;
    std::exception_ptr error;
    lock.unlock();
    try {
      const std::size_t first = slot & ~std::size_t{1};
      const auto dampings = inverter.dampings(first, {inverter.traces(first), inverter.traces(first + 1)}, run.damping);
      result.inverse = inverter.invert(slot, dampings.at(slot - first), result.failures);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    if (!wanted(run)) {
      return;
    }
    if (error) {
      failed = error;
    } else {
      made.insert_or_assign(slot, std::move(result));
    }
    changed.notify_all();
    if (error) {
      return;
    }
  }
}

EarlyInverses::EarlyInverses()
    : state_(std::make_shared<State>()),
      thread_("tx_inverses", [state = state_] { state->loop(); }),
      creator_(getpid()) {}

EarlyInverses::~EarlyInverses() {
  if (getpid() != creator_) {
    // A forked child has neither the thread nor, for certain, its lock: both are leaked.
    thread_.abandon();
    static_cast<void>(new (std::nothrow) std::shared_ptr<State>(state_));
    return;
  }
  {
    std::lock_guard lock(state_->mutex);
    state_->closed = true;
    state_->changed.notify_all();
  }
  // An inversion takes no longer, as a rule.
  thread_.finish(std::chrono::milliseconds(200));
}

void EarlyInverses::follow(KfacExchange::Sum run, std::vector<std::size_t> slots, const FactorInverter& inverter,
                           double damping) {
  std::lock_guard lock(state_->mutex);
  state_->queue.push_back({state_->step, std::move(run), std::move(slots), inverter, damping});
  ++state_->followed;
  state_->changed.notify_all();
}

std::size_t EarlyInverses::runs() const {
  std::lock_guard lock(state_->mutex);
  return state_->followed;
}

void EarlyInverses::waitForRuns(std::size_t runs) {
  std::unique_lock lock(state_->mutex);
  waitAttentively(state_->changed, lock, [&] { return state_->come >= runs || state_->lost; });
  if (state_->come < runs) {
    std::rethrow_exception(state_->lost);
  }
}

FactorInverse EarlyInverses::collect(std::size_t slot, InverseFailures& failures) {
  std::unique_lock lock(state_->mutex);
  waitAttentively(state_->changed, lock, [&] { return state_->made.contains(slot) || state_->lost || state_->failed; });
  const auto found = state_->made.find(slot);
  if (found == state_->made.end()) {
    std::rethrow_exception(state_->failed ? state_->failed : state_->lost);
  }
  const InverseFailures counted = std::exchange(found->second.failures, {});
  failures.retried += counted.retried;
  failures.kept += counted.kept;
  return found->second.inverse;  // kept: a step that was interrupted here may be taken again
}

void EarlyInverses::end() {
  std::unique_lock lock(state_->mutex);
  ++state_->step;
  state_->followed = 0;
  state_->come = 0;
  state_->made.clear();
  state_->lost = nullptr;
  state_->failed = nullptr;
  waitAttentively(state_->changed, lock, [&] { return state_->queue.empty() && !state_->working; });
}

}  // namespace torchext
