#include "core/prague/rejoin_window.h"

#include <algorithm>
#include <utility>

#include "core/base/check.h"

namespace torchext::core {
namespace {

// Seconds. What workers in step may be apart because a machine is busy, however short their steps.
constexpr double kShortestWait = 0.1;

}  // namespace

RejoinWindow::RejoinWindow(int workers, double longest)
    : longest_(longest), workers_(index(workers)), living_(workers) {}

void RejoinWindow::onMeet(int worker, double now) {
  Worker& state = workers_[index(worker)];
  if (state.met) {
    return;
  }
  state.met = true;
  ++met_;
  if (met_ < living_ || missed_ > 0) {
    return;
  }
  met_at_ = now;
  for (Worker& each : workers_) {
    each.awaited = !each.gone;
  }
  awaited_ = living_;
}

void RejoinWindow::onRequest(int worker, double now) {
  clear(workers_[index(worker)]);
  if (awaited_ > 0 && !deadline_) {
    deadline_ = now + std::min(std::max(now - met_at_, kShortestWait), longest_);
  }
  expire(now);
}

void RejoinWindow::onLeave(int worker) {
  Worker& state = workers_[index(worker)];
  clear(state);
  state.gone = true;
  --living_;
}

void RejoinWindow::expire(double now) {
  if (!deadline_ || now < *deadline_) {
    return;
  }
  for (Worker& each : workers_) {
    if (std::exchange(each.awaited, false)) {
      each.missed = true;
      ++missed_;
    }
  }
  awaited_ = 0;
  deadline_.reset();
}

void RejoinWindow::clear(Worker& worker) {
  met_ -= std::exchange(worker.met, false) ? 1 : 0;
  awaited_ -= std::exchange(worker.awaited, false) ? 1 : 0;
  missed_ -= std::exchange(worker.missed, false) ? 1 : 0;
  if (awaited_ == 0) {
    deadline_.reset();
  }
}

}  // namespace torchext::core
