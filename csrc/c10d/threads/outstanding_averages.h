// OutstandingAverages: averages that the attached models of this process owe other workers. They are drained before
// this process waits for anybody.
//
// A group that the generator has formed counts on all its members: until each has sent its parameters the others wait.
// A worker sends when its own training reaches that group. If it blocks before - in a collective of all ranks, or for
// the average of another model - while a member of the group waits for it, two workers can wait for each other for
// ever: a model's groups stand in one order for all its members, but nothing orders them against a collective or
// against another model's groups. So a thread that is about to block first has every other model complete the averages
// it owes.
//
// What is about to be waited for matters to who is waited for afterwards: from a call that all ranks make all come back
// together (core/prague/rejoin_window.h), from a message or another model's average one may come while others wait for
// it.
//
// All models at once, not one after the other: had a worker to wait until its first model's groups are through before
// it turns to the second, another could be waiting for the second the other way round.
//
// One list a process, because the models of two process groups block each other just as well.
// Threads: all functions may be called from any. What a callback begins goes on on a thread of the model's own; the
// thread that is about to block waits until it is done. remove() waits for a callback that runs, so what it looks at
// may end then; no lock is held while one runs.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <future>
#include <mutex>
#include <vector>

#include "c10d/threads/interruptible_wait.h"

namespace torchext {

// Ready when the outstanding averages are done, or cannot be any more (with the exception, which is its model's to
// report: the model has failed, and says so in whatever it is next asked for); not valid where there were none.
using AverageDone = std::shared_future<void>;

// What a thread is about to wait for.
enum class WaitingFor {
  kEverybody,  // in a call that all ranks make
  kSomebody,   // a message, another model's average
};

class OutstandingAverages {
 public:
  // begin must neither block nor call OutstandingAverages::remove(). Returns an id, never 0.
  static std::uint64_t add(std::function<AverageDone(WaitingFor)> begin);
  static void remove(std::uint64_t id);
  // Runs every callback but that of `except`. Their exceptions pass through. Nothing inside an InternalCollective.
  static std::vector<AverageDone> beginAll(WaitingFor what, std::uint64_t except = 0);
  static bool ready(const AverageDone& done);
  // Until all are ready, done or failed: who waits is at another model, or at a collective of the script, and its group
  // is well. What a signal's handler raises ends it at once.
  static void wait(const std::vector<AverageDone>& averages);
  static void drain(WaitingFor what) { wait(beginAll(what)); }

  // Until `ready`, which the caller's lock guards, on the thread that called what is waited for. Outstanding averages
  // were drained then, but since then this rank may owe others: a backward pass asks for the next group while DDP's own
  // collective is under way. Who waits for that may not have come to the call yet.
  template <class Ready>
  static void waitAndDrain(std::condition_variable& changed, std::unique_lock<std::mutex>& lock, Ready ready) {
    if (changed.wait_for(lock, kPatience, ready)) {
      return;
    }
    lock.unlock();
    const std::vector<AverageDone> averages = beginAll(WaitingFor::kSomebody);
    lock.lock();
    waitInterruptibly(changed, lock, ready);
    lock.unlock();
    wait(averages);  // they read parameters, which the caller is free to write now
    lock.lock();
  }

  // The same, until `limit` at most: whether it is ready. Where it is not, what has been begun goes on, as the time is
  // the caller's, and the next step of its model waits for it. It is begun however short the time: some ask again and
  // again.
  template <class Ready>
  static bool waitAndDrain(std::condition_variable& changed, std::unique_lock<std::mutex>& lock,
                           std::chrono::steady_clock::time_point limit, Ready ready) {
    if (changed.wait_until(lock, std::min(limit, std::chrono::steady_clock::now() + kPatience), ready)) {
      return true;
    }
    lock.unlock();
    const std::vector<AverageDone> averages = beginAll(WaitingFor::kSomebody);
    lock.lock();
    if (!waitInterruptibly(changed, lock, limit, ready)) {
      return false;
    }
    lock.unlock();
    wait(averages);
    lock.lock();
    return true;
  }

  // The same around a call that blocks where nobody can look. The patience is another thread's, which is started where
  // a model is attached.
  static void drainDuring(const std::function<void()>& blocking);

 private:
  // How long a wait lasts before others are taken to be waiting for this rank.
  static constexpr std::chrono::milliseconds kPatience{100};
};

// Around collectives that an attached model makes itself, when its outstanding averages are done.
class InternalCollective {
 public:
  InternalCollective();
  ~InternalCollective();
  InternalCollective(const InternalCollective&) = delete;
  InternalCollective& operator=(const InternalCollective&) = delete;
};

}  // namespace torchext
