#include "c10d/fault/group_waits.h"
#include "c10d/fault/explain_error.h"

#include <atomic>
#include <exception>
#include <stdexcept>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

namespace torchext {
namespace {

// A blocked point-to-point wait, on the stack of the waiting thread.
class PointToPointWait final : public PendingOperation {
 public:
  explicit PointToPointWait(c10d::Work& work) : work_(work) {}

 protected:
  std::function<void()> interrupt() override {
    work_.abort();  // sets a flag of the buffer and signals; also right when the wait has not begun yet
    return {};
  }

 private:
  c10d::Work& work_;
};

// A wait that looks at itself now and then.
class LookingWait final : public PendingOperation {
 public:
  bool interrupted() const { return interrupted_; }

 protected:
  std::function<void()> interrupt() override {
    interrupted_ = true;
    return {};
  }

 private:
  std::atomic<bool> interrupted_{false};
};

[[noreturn]] void throwInterrupted(const GroupHealth& health, const OpInfo& op) {
  if (health.failed()) {
    std::rethrow_exception(health.failureOf(op));
  }
  C10_THROW_ERROR(DistBackendError, health.describe(op) + ": the wait was ended by shutdown");
}

}  // namespace

void waitPointToPoint(GroupHealth& health, const c10::intrusive_ptr<c10d::Work>& work,
                      std::chrono::milliseconds timeout, const OpInfo& op) {
  PointToPointWait node(*work);
  health.add(&node, op);
  bool arrived = false;
  try {
    arrived = work->wait(timeout == kNoTimeout && op.background ? FailureMonitor::kForever : timeout);
    health.remove(&node);
  } catch (...) {
    health.remove(&node);
    std::rethrow_exception(explain(health, std::current_exception(), op));
  }
  if (!arrived) {
    throwInterrupted(health, op);
  }
}

void waitUntil(GroupHealth& health, const std::function<bool(std::chrono::milliseconds limit)>& look,
               std::chrono::milliseconds timeout, const OpInfo& op) {
  LookingWait node;
  health.add(&node, op);
  const auto begin = std::chrono::steady_clock::now();
  bool arrived = false;
  bool late = false;
  try {
    while (!arrived && !late && !node.interrupted()) {
      arrived = look(kLook);
      late = !arrived && timeout.count() > 0 && std::chrono::steady_clock::now() - begin >= timeout;
    }
    health.remove(&node);
  } catch (...) {  // a peer has left, say
    health.remove(&node);
    throw;
  }
  if (arrived) {
    return;
  }
  if (late) {
    // As Gloo says it.
    const std::runtime_error error(c10::str("Timed out waiting ", timeout.count(), "ms for ", nameOf(op)));
    std::rethrow_exception(explain(health, std::make_exception_ptr(error), op));
  }
  throwInterrupted(health, op);
}

}  // namespace torchext
