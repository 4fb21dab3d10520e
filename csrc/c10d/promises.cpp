#include "c10d/promises.h"

#include <map>
#include <thread>
#include <utility>

#include <c10/util/thread_name.h>

namespace torchext {
namespace {

thread_local int internal_collectives = 0;  // alive on this thread

struct PromiseCallbacks {
  std::mutex mutex;
  // In the order of attaching, the same on every rank.
  std::map<std::uint64_t, std::function<KeptPromise(WaitingFor)>> callbacks;
  std::uint64_t last = 0;
};

// Never destroyed: a model may be detached by the interpreter's last garbage collection.
PromiseCallbacks& promiseCallbacks() {
  static PromiseCallbacks& instance = *new PromiseCallbacks;
  return instance;
}

bool nobodyPromises() {
  PromiseCallbacks& all = promiseCallbacks();
  std::lock_guard<std::mutex> lock(all.mutex);
  return all.callbacks.empty();
}

}  // namespace

std::uint64_t Promises::add(std::function<KeptPromise(WaitingFor)> begin) {
  PromiseCallbacks& all = promiseCallbacks();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.callbacks.emplace(++all.last, std::move(begin));
  return all.last;
}

void Promises::remove(std::uint64_t id) {
  PromiseCallbacks& all = promiseCallbacks();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.callbacks.erase(id);
}

std::vector<KeptPromise> Promises::beginAll(WaitingFor what, std::uint64_t except) {
  if (internal_collectives > 0) {
    return {};
  }
  PromiseCallbacks& all = promiseCallbacks();
  std::lock_guard<std::mutex> lock(all.mutex);
  std::vector<KeptPromise> kept;
  kept.reserve(all.callbacks.size());
  for (const auto& [id, callback] : all.callbacks) {
    if (id != except) {
      kept.push_back(callback(what));
    }
  }
  return kept;
}

bool Promises::ready(const KeptPromise& kept) {
  return !kept.valid() || kept.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

void Promises::wait(const std::vector<KeptPromise>& kept) {
  for (const KeptPromise& promise : kept) {
    if (promise.valid()) {
      waitAttentively(promise);
    }
  }
}

void Promises::keepDuring(const std::function<void()>& blocking) {
  if (internal_collectives > 0 || nobodyPromises()) {
    blocking();
    return;
  }
  std::mutex mutex;
  std::condition_variable changed;
  bool over = false;
  std::vector<KeptPromise> kept;
  std::exception_ptr error;
  std::thread patience([&] {
    c10::setThreadName("tx_promises");
    std::unique_lock<std::mutex> lock(mutex);
    if (changed.wait_for(lock, kPatience, [&] { return over; })) {
      return;
    }
    try {
      kept = beginAll(WaitingFor::kSomebody);
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
  wait(kept);
}

InternalCollective::InternalCollective() { ++internal_collectives; }
InternalCollective::~InternalCollective() { --internal_collectives; }

}  // namespace torchext
