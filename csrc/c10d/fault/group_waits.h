// Waits for one peer that a failure of the group ends.
//
// Threads: any thread may wait; an abort from another one ends it.
#pragma once

#include <chrono>
#include <functional>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "c10d/fault/group_health.h"

namespace torchext {

// Waits for a point-to-point work of an inner group such that a failure ends the wait. Costs two short locks, no
// allocation.
// timeout: 0 is that which the inner group connected with. Throws DistBackendError that names backend, peer and who
// died; see explain() (explain_error.h).
void waitPointToPoint(GroupHealth& health, const c10::intrusive_ptr<c10d::Work>& work,
                      std::chrono::milliseconds timeout, const OpInfo& op);

// The same for what is no work of an inner group: asks `look` until it is true, for kLook at a time. `look` may block
// that long. timeout: 0 is none.
void waitUntil(GroupHealth& health, const std::function<bool(std::chrono::milliseconds limit)>& look,
               std::chrono::milliseconds timeout, const OpInfo& op);
constexpr std::chrono::milliseconds kLook{20};

}  // namespace torchext
