#include "c10d/fault/explain_error.h"

#include <chrono>
#include <cstdint>
#include <optional>
#include <utility>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include "c10d/fault/connection_error.h"
#include "c10d/fault/group_health.h"
#include "c10d/fault/local_error.h"
#include "c10d/fault/orderly_exit_scope.h"

namespace torchext {
namespace {

// How long a failed operation waits to learn from the monitor who died.
constexpr std::chrono::milliseconds kFaultMessageLimit{1000};
constexpr std::chrono::milliseconds kUnwatchedLimit{200};

}  // namespace

std::exception_ptr distError(std::string text) {
  return std::make_exception_ptr(
      c10::DistBackendError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, std::move(text)));
}

std::exception_ptr refuse(GroupHealth& health, const OpInfo& op, const std::string& error) {
  health.poison(op.peer, c10::str("rank ", op.peer, " sent a malformed message: ", error));
  return health.failureOf(op);
}

void reportTimeout(GroupHealth& health, const OpInfo& op, const std::string& detail) {
  std::optional<core::LaggardQuery> answer;
  if (op.sequence > 0 && health.monitor() && !health.failed()) {
    answer = health.monitor()->ask(op.sequence, GroupHealth::kLaggardLimit);
  }
  const auto own = c10::str("rank ", health.identity().rank(), " timed out in ", nameOf(op));
  if (answer && answer->laggard >= 0) {
    health.poison(answer->laggard, c10::str(GroupProgress::ofLaggard(*answer, op.name), "; ", own, ": ", detail),
                  GroupHealth::kRemoteGrace);
  } else {
    health.poison(health.identity().rank(), c10::str(own, answer ? ", which every rank has called: " : ": ", detail),
                  GroupHealth::kRemoteGrace);
  }
}

std::exception_ptr explain(GroupHealth& health, const std::exception_ptr& error, const OpInfo& op) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::DistBackendError&) {
    return error;
  } catch (const std::exception& inner) {
    if (!isConnectionError(inner)) {
      return error;
    }
    const std::string text = shortened(inner.what());
    const bool timed_out = contains(text, "Timed out");
    // Once the successor has left in order nobody is watched, and no fault message comes.
    const bool watched = health.monitor() && !health.monitor()->successorLeft();
    if (timed_out) {
      reportTimeout(health, op, text);
    } else if (!health.reason().waitUntilSet(watched ? kFaultMessageLimit : kUnwatchedLimit)) {
      health.poison(health.identity().rank(),
                    c10::str("rank ", health.identity().rank(), " lost its connections in ", nameOf(op), ": ", text,
                             op.peer >= 0 ? c10::str("; has rank ", op.peer, " left, or taken fewer steps?") : ""),
                    GroupHealth::kRemoteGrace);
    }
    const auto reason = health.reason().get().text;
    return distError(c10::str(health.describe(op), ": ", reason, contains(reason, text) ? "" : "; seen here as: ",
                              contains(reason, text) ? "" : text, kWayOut));
  } catch (...) {
    return error;
  }
}

std::exception_ptr explainToAll(GroupHealth& health, const std::exception_ptr& error, const OpInfo& op) {
  std::exception_ptr explained = explain(health, error, op);
  if (const auto fault = localError(explained); fault && !health.failed()) {
    // Whether or not the script ends: this rank exchanges no more, and others may train on.
    const OrderlyExitScope orderly_exit;
    health.poison(health.identity().rank(),
                  c10::str("rank ", health.identity().rank(), " failed in ", nameOf(op), ": ", *fault));
  }
  return explained;
}

}  // namespace torchext
