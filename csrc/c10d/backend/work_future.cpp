#include "c10d/backend/work_future.h"

#include <c10/util/Logging.h>

namespace torchext {

void setFuture(const FuturePtr& future, const std::exception_ptr& error, const c10::IValue& value) {
  if (error) {
    future->setError(error);
  } else {
    future->markCompleted(value);
  }
}

void setFutureElsewhere(GroupHealth& health, const FuturePtr& future, const std::exception_ptr& error,
                        const c10::IValue& value, bool nested) {
  if (!future) {
    return;
  }
  const auto task = [future, error, value] {
    try {
      setFuture(future, error, value);
    } catch (const std::exception& thrown) {  // by a callback in C++; those of Python and then() keep their errors
      LOG(WARNING) << "torchext: a callback of a future threw: " << thrown.what();
    }
  };
  if (!health.callbacks().post(task, nested)) {
    task();
  }
}

}  // namespace torchext
