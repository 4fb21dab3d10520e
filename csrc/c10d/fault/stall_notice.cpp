#include "c10d/fault/stall_notice.h"

#include <algorithm>

#include <c10/util/Logging.h>

namespace torchext {

void StallNotice::look(const GroupHealth& health) {
  const auto now = std::chrono::steady_clock::now();
  const auto& monitor = health.monitor();
  if (patience_.count() == 0 || now < next_ || !health.usable() || !monitor) {
    return;
  }
  const auto op = health.pending().oldestCollective(noted_);
  if (!op || now - op->since < patience_) {
    return;
  }
  const auto answer = monitor->ask(op->sequence, std::min(patience_ / 10, GroupHealth::kLaggardLimit));
  if (!answer) {
    // It may have been late, or a rank is stopped, which the heartbeat finds: not to be kept from its clock.
    next_ = now + patience_;
    return;
  }
  noted_ = op->since;
  if (answer->laggard < 0 || health.failed()) {
    return;  // every rank has called it: a slow link, which is no fault
  }
  next_ = now + 12 * patience_;
  LOG(WARNING) << health.label() << ": " << GroupProgress::ofLaggard(*answer, op->name) << "; rank "
               << health.identity().rank() << " called it " << secondsOf(now - op->since) << " ago, and waits on";
}

}  // namespace torchext
