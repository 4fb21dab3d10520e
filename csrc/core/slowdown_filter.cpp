#include "slowdown_filter.h"

#include <algorithm>

#include "check.h"

namespace torchext::core {
namespace {

// Requests, in thresholds, over which waited steps fade to 1/e. A worker that is slower than the others by more than
// 1 / kFade of a step makes them reach the threshold.
constexpr double kFade = 4.0;

}  // namespace

SlowdownFilter::SlowdownFilter(int workers, std::int64_t threshold)
    : threshold_(static_cast<double>(threshold)), workers_(index(workers)) {}

void SlowdownFilter::onRequest(int worker, double now) {
  Worker& state = workers_[index(worker)];
  state.count += 1;
  foremost_ = std::max(foremost_, state.count);
  if (threshold_ > 0) {
    state.waited *= 1.0 - 1.0 / (kFade * threshold_);
  }
  if (state.computing) {
    state.step_time = std::max(0.0, now - state.completed_at);
    state.computing = false;
  }
}

void SlowdownFilter::onComplete(int worker, double now) {
  Worker& state = workers_[index(worker)];
  state.completed_at = now;
  state.computing = true;
}

void SlowdownFilter::onWaited(int worker, double seconds) {
  Worker& state = workers_[index(worker)];
  if (seconds > 0 && state.step_time > 0) {
    // One wait says that one step was slow, however long it was: a checkpoint or a page fault must not filter anybody.
    state.waited += std::min(seconds / state.step_time, threshold_ / 2);
  }
}

void SlowdownFilter::onPause(int worker) {
  Worker& state = workers_[index(worker)];
  state.lag = foremost_ - state.count;
}

void SlowdownFilter::onReturn(int worker) {
  Worker& state = workers_[index(worker)];
  state.count = foremost_ - state.lag;
  state.computing = false;  // the time away is not a step time
}

SlowdownFilter::Reference SlowdownFilter::reference(int initiator, const std::vector<int>& workers) const {
  const Worker& own = workers_[index(initiator)];
  if (threshold_ == 0 || workers.empty()) {
    return Reference{own.count, own.progress()};
  }
  std::vector<double> values(workers.size());
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  const auto upper_middle = [&](auto of) {
    std::transform(workers.begin(), workers.end(), values.begin(),
                   [&](int worker) { return of(workers_[index(worker)]); });
    std::nth_element(values.begin(), middle, values.end());
    return *middle;
  };
  const double count = upper_middle([](const Worker& worker) { return worker.count; });
  const double progress = upper_middle([](const Worker& worker) { return worker.progress(); });
  return Reference{std::max(own.count, count), std::max(own.progress(), progress)};
}

bool SlowdownFilter::foremostBy(int worker, const std::vector<int>& workers) const {
  if (threshold_ == 0) {
    return false;
  }
  bool others = false;
  for (const int other : workers) {
    if (other == worker) {
      continue;
    }
    others = true;
    if (workers_[index(worker)].count - workers_[index(other)].count < threshold_) {
      return false;
    }
  }
  return others;
}

bool SlowdownFilter::late(const Reference& reference, int worker) const {
  const Worker& state = workers_[index(worker)];
  return threshold_ > 0 && std::max(reference.count - state.count, reference.progress - state.progress()) >= threshold_;
}

}  // namespace torchext::core
