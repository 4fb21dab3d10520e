#include "c10d/threads/outstanding_averages.h"

#include <map>
#include <memory>
#include <thread>
#include <utility>

#include <c10/util/ScopeExit.h>
#include <c10/util/thread_name.h>

namespace torchext {
namespace {

thread_local int internal_collectives = 0;  // alive on this thread

struct AverageCallbacks {
  std::mutex mutex;  // guards what follows, and is not held while a callback runs
  std::condition_variable over;
  // In the order of attaching, the same on every rank.
  std::map<std::uint64_t, std::shared_ptr<const std::function<AverageDone(WaitingFor)>>> callbacks;
  std::map<std::uint64_t, int> running;  // by how many threads
  std::uint64_t last = 0;
};

// Never destroyed: a model may be detached by the interpreter's last garbage collection.
AverageCallbacks& averageCallbacks() {
  static AverageCallbacks& instance = *new AverageCallbacks;
  return instance;
}

bool noneRegistered() {
  AverageCallbacks& all = averageCallbacks();
  std::lock_guard<std::mutex> lock(all.mutex);
  return all.callbacks.empty();
}

}  // namespace

std::uint64_t OutstandingAverages::add(std::function<AverageDone(WaitingFor)> begin) {
  AverageCallbacks& all = averageCallbacks();
  auto callback = std::make_shared<const std::function<AverageDone(WaitingFor)>>(std::move(begin));
  std::lock_guard<std::mutex> lock(all.mutex);
  all.callbacks.emplace(++all.last, std::move(callback));
  return all.last;
}

void OutstandingAverages::remove(std::uint64_t id) {
  AverageCallbacks& all = averageCallbacks();
  std::unique_lock<std::mutex> lock(all.mutex);
  const auto removed = all.callbacks.extract(id);  // goes without the lock
  all.over.wait(lock, [&] { return !all.running.contains(id); });
  lock.unlock();
}

std::vector<AverageDone> OutstandingAverages::beginAll(WaitingFor what, std::uint64_t except) {
  if (internal_collectives > 0) {
    return {};
  }
  AverageCallbacks& all = averageCallbacks();
  std::vector<AverageDone> averages;
  std::unique_lock<std::mutex> lock(all.mutex);
  for (auto next = all.callbacks.begin(); next != all.callbacks.end();) {
    const auto [id, callback] = *next;
    if (id != except) {
      ++all.running[id];
      lock.unlock();
      const auto over = c10::make_scope_exit([&, id = id] {
        lock.lock();
        if (--all.running[id] == 0) {
          all.running.erase(id);
        }
        all.over.notify_all();
      });
      averages.push_back((*callback)(what));
    }
    next = all.callbacks.upper_bound(id);  // some may have gone, or come, meanwhile
  }
  return averages;
}

bool OutstandingAverages::ready(const AverageDone& done) {
  return !done.valid() || done.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

void OutstandingAverages::wait(const std::vector<AverageDone>& averages) {
  for (const AverageDone& done : averages) {
    if (done.valid()) {
      waitInterruptibly(done);
    }
  }
}

void OutstandingAverages::drainDuring(const std::function<void()>& blocking) {
  if (internal_collectives > 0 || noneRegistered()) {
    blocking();
    return;
  }
  std::mutex mutex;
  std::condition_variable changed;
  bool over = false;
  std::vector<AverageDone> averages;
  std::exception_ptr error;
  std::thread patience([&] {
    c10::setThreadName("tx_averages");
    std::unique_lock<std::mutex> lock(mutex);
    if (changed.wait_for(lock, kPatience, [&] { return over; })) {
      return;
    }
    try {
      averages = beginAll(WaitingFor::kSomebody);
    } catch (...) {
      error = std::current_exception();
    }
  });
  const auto end = [&] {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      over = true;
    }
    changed.notify_all();
    patience.join();
  };
  try {
    blocking();
  } catch (...) {
    end();
    throw;
  }
  end();
  if (error) {
    std::rethrow_exception(error);
  }
  wait(averages);
}

InternalCollective::InternalCollective() { ++internal_collectives; }
InternalCollective::~InternalCollective() { --internal_collectives; }

}  // namespace torchext
