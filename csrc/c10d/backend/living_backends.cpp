#include "c10d/backend/living_backends.h"

#include <algorithm>
#include <mutex>

#include "c10d/backend/delegating_backend.h"

namespace torchext {
namespace {

using WeakBackend = c10::weak_intrusive_ptr<DelegatingBackend>;

struct List {
  std::mutex mutex;
  std::vector<WeakBackend> backends;
};

List& list() {
  static auto* instance = new List;  // never destroyed: threads may outlive static destruction
  return *instance;
}

}  // namespace

void LivingBackends::add(const c10::intrusive_ptr<DelegatingBackend>& backend) {
  const std::lock_guard lock(list().mutex);
  list().backends.emplace_back(backend);
}

void LivingBackends::remove(const DelegatingBackend& backend) {
  std::vector<WeakBackend> removed;  // let go of without the lock
  const std::lock_guard lock(list().mutex);
  auto& backends = list().backends;
  const auto found = std::find_if(backends.begin(), backends.end(),
                                  [&](const WeakBackend& entry) { return entry._unsafe_get_target() == &backend; });
  if (found != backends.end()) {
    removed.push_back(std::move(*found));
    backends.erase(found);
  }
}

std::vector<c10::intrusive_ptr<DelegatingBackend>> LivingBackends::all() {
  std::vector<c10::intrusive_ptr<DelegatingBackend>> alive;
  const std::lock_guard lock(list().mutex);
  for (const WeakBackend& entry : list().backends) {
    if (auto backend = entry.lock()) {
      alive.push_back(std::move(backend));
    }
  }
  return alive;
}

}  // namespace torchext
