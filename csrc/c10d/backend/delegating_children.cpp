// The groups that a DelegatingBackend makes of some of its ranks: split, shrink, and what comes before the latter.
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "c10d/backend/delegating_backend.h"
#include "c10d/backend/living_backends.h"
#include "c10d/fault/orderly_exit_scope.h"
#include "c10d/threads/interpreter_lock.h"

namespace torchext {

c10::intrusive_ptr<c10d::Backend> DelegatingBackend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                           const std::vector<int>& ranks,
                                                           const c10::intrusive_ptr<Options>& opts) {
  health_->checkUsable("split");
  beforeCollective();
  const auto split_inner = [&](const c10::intrusive_ptr<c10d::Backend>& backend, const char* prefix) {
    auto inner_options = cloneOptions(backend->getBackendOptions());
    inner_options->timeout = opts->timeout;
    inner_options->group_name = opts->group_name;
    inner_options->global_ranks_in_group = opts->global_ranks_in_group;
    return backend->split(c10::make_intrusive<c10d::PrefixStore>(prefix, store), ranks, inner_options);
  };
  const InnerBackends own = innerBackends();
  InnerBackends children;
  children.sockets = own.sockets;  // Gloo's device, with its event loop, is the parent's
  children.cpu = split_inner(inner(c10::DeviceType::CPU), "cpu");
  if (own.cuda) {
    children.cuda = split_inner(own.cuda, "cuda");
  }
  const auto position = std::find(ranks.begin(), ranks.end(), rank_);
  if (position == ranks.end()) {
    return nullptr;
  }
  // Not of own.cpu: Gloo of torch 2.11 mostly hangs when one of its groups is split a second time.
  if (ranks.size() > 1) {
    children.control = split_inner(own.control ? own.control : own.cpu, "control");
  }
  return createChild(static_cast<int>(position - ranks.begin()), static_cast<int>(ranks.size()), std::move(children),
                     opts);
}

c10::intrusive_ptr<c10d::Backend> DelegatingBackend::createChild(int rank, int size, InnerBackends inner,
                                                                 c10::intrusive_ptr<Options> options) {
  return makeBackend<DelegatingBackend>(rank, size, name_, std::move(inner), std::move(options));
}

c10::intrusive_ptr<c10d::Backend> DelegatingBackend::shrink(const std::vector<int64_t>& ranks_to_exclude, int flags,
                                                            const c10::intrusive_ptr<Options>& opts_override) {
  TORCH_CHECK_NOT_IMPLEMENTED(!opts_override, health_->label(),
                              ": shrink_group takes no pg_options here; the new group has this one's");
  TORCH_CHECK_NOT_IMPLEMENTED(innerFactory_, health_->label(), ": this group cannot be shrunk any more");
  std::vector<int> remaining;
  auto options = c10::make_intrusive<Options>(name_, options_->timeout);
  const auto& global = options_->global_ranks_in_group;
  for (int rank = 0; rank < size_; ++rank) {
    if (std::find(ranks_to_exclude.begin(), ranks_to_exclude.end(), rank) == ranks_to_exclude.end()) {
      remaining.push_back(rank);
      const auto position = static_cast<std::size_t>(rank);
      options->global_ranks_in_group.push_back(position < global.size() ? global[position] : position);
    }
  }
  const auto self = std::find(remaining.begin(), remaining.end(), rank_);
  TORCH_CHECK_VALUE(self != remaining.end(), health_->label(), ": shrink_group called on a rank that it excludes");
  if (flags != 0) {
    abort();
  }
  c10::intrusive_ptr<c10d::Backend> child;
  withoutInterpreterLock([&] {
    const int rank = static_cast<int>(self - remaining.begin());
    const int size = static_cast<int>(remaining.size());
    child = createChild(rank, size, innerFactory_(remaining, rank), options);
  });
  // It may lose ranks again. Their numbers are of the first group, so that no two memberships meet in one place.
  static_cast<DelegatingBackend&>(*child).setInnerFactory(
      [factory = innerFactory_, remaining](const std::vector<int>& ranks, int rank) {
        std::vector<int> of_first;
        of_first.reserve(ranks.size());
        for (const int own : ranks) {
          of_first.push_back(remaining[static_cast<std::size_t>(own)]);
        }
        return factory(of_first, rank);
      });
  return child;
}

}  // namespace torchext
