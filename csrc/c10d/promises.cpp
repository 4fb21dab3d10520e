#include "c10d/promises.h"

#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace torchext {
namespace {

thread_local int internal_collectives = 0;  // alive on this thread

struct Registry {
  std::mutex mutex;
  std::map<std::uint64_t, std::function<void()>> callbacks;  // in the order of attaching, the same on every rank
  std::uint64_t last = 0;
};

// Never destroyed: a model may be detached by the interpreter's last garbage collection.
Registry& registry() {
  static Registry& instance = *new Registry;
  return instance;
}

}  // namespace

std::uint64_t Promises::add(std::function<void()> keep) {
  Registry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.callbacks.emplace(++all.last, std::move(keep));
  return all.last;
}

void Promises::remove(std::uint64_t id) {
  Registry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.callbacks.erase(id);
}

void Promises::keepAll(std::uint64_t except) {
  if (internal_collectives > 0) {
    return;
  }
  std::vector<std::function<void()>> callbacks;
  {
    Registry& all = registry();
    std::lock_guard<std::mutex> lock(all.mutex);
    for (const auto& [id, callback] : all.callbacks) {
      if (id != except) {
        callbacks.push_back(callback);
      }
    }
  }
  for (const auto& callback : callbacks) {
    callback();
  }
}

InternalCollective::InternalCollective() { ++internal_collectives; }
InternalCollective::~InternalCollective() { --internal_collectives; }

}  // namespace torchext
