// The future of a work of ours: its end, of which the callbacks of scripts hear on threads for them
// (callback_threads.h).
//
// Works make their future when it is first asked for: without one, the end of a call needs no other thread.
#pragma once

#include <exception>

#include <ATen/core/ivalue.h>

#include "c10d/fault/group_health.h"

namespace torchext {

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

// Sets the error, or the value where there is none; what has been added to the future runs on this thread.
void setFuture(const FuturePtr& future, const std::exception_ptr& error, const c10::IValue& value);

// The same on a thread of the group's for callbacks; null: nobody has asked. nested: the call was made in a callback.
void setFutureElsewhere(GroupHealth& health, const FuturePtr& future, const std::exception_ptr& error,
                        const c10::IValue& value, bool nested);

}  // namespace torchext
