// LivingBackends: the backends of this process that are owned by somebody, for the end of the process.
//
// The list owns nothing. Whoever takes backends from it owns them until done, so that another thread, or a signal's
// handler, may let go of its groups meanwhile.
// Threads: everything from any thread. The lock is held for changes of the list alone: no backend ends under it.
#pragma once

#include <utility>
#include <vector>

#include <c10/util/intrusive_ptr.h>

namespace torchext {

class DelegatingBackend;

class LivingBackends {
 public:
  static void add(const c10::intrusive_ptr<DelegatingBackend>& backend);
  // When nobody owns it any more.
  static void remove(const DelegatingBackend& backend);
  // In the order of their making.
  static std::vector<c10::intrusive_ptr<DelegatingBackend>> all();
};

// The one way to make a backend of ours: one that is not on the list would not leave its peers in order.
template <class Group, class... Arguments>
c10::intrusive_ptr<Group> makeBackend(Arguments&&... arguments) {
  auto backend = c10::make_intrusive<Group>(std::forward<Arguments>(arguments)...);
  LivingBackends::add(backend);
  return backend;
}

}  // namespace torchext
