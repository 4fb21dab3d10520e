#include "core/prague/slowdown_filter.h"

#include <algorithm>
#include <utility>

#include "core/base/check.h"

namespace torchext::core {
namespace {

// Requests, in thresholds, over which what is past fades to 1/e. A worker that is slower than the others by more than
// 1 / kFade of a step makes them reach the threshold.
constexpr double kFade = 4.0;

double upperMiddle(std::vector<double> values) {
  if (values.empty()) {
    return 0;
  }
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

SlowdownFilter::SlowdownFilter(int workers, std::int64_t threshold)
    : threshold_(static_cast<double>(threshold)), workers_(index(workers)) {}

void SlowdownFilter::onRequest(int worker, double now) {
  Worker& state = workers_[index(worker)];
  if (threshold_ > 0) {
    const double fading = 1.0 / (kFade * threshold_);
    state.waited *= 1.0 - fading;
    state.count += fading * (middleCount() - state.count);
  }
  state.count += 1;
  if (state.requested_at) {
    const double step = now - *state.requested_at - state.in_groups;
    if (step > 0) {
      // One wait says that one step was slow, however long it was: a checkpoint or a page fault must not filter
      // anybody.
      state.waited += std::min(state.in_groups / step, threshold_ / 2);
    }
  }
  state.requested_at = now;
  state.in_groups = 0;
}

void SlowdownFilter::onWaited(int worker, double seconds) { workers_[index(worker)].in_groups += seconds; }

void SlowdownFilter::onPause(int worker) {
  Worker& state = workers_[index(worker)];
  state.ahead = state.count - middleCount();
  state.active = false;
}

void SlowdownFilter::onReturn(int worker) {
  Worker& state = workers_[index(worker)];
  // Where it was after its last request: the next one is about to be counted. In front of it, each of those that come
  // back one after the other would stand a request ahead of the one before.
  state.count = middleCount() + state.ahead - 1;
  state.active = true;
  state.requested_at.reset();  // the time away is not a step time
}

double SlowdownFilter::middleCount() const {
  std::vector<double> counts;
  counts.reserve(workers_.size());
  for (const Worker& worker : workers_) {
    if (worker.active) {
      counts.push_back(worker.count);
    }
  }
  return upperMiddle(std::move(counts));
}

SlowdownFilter::Reference SlowdownFilter::reference(int initiator, const std::vector<int>& workers) const {
  const Worker& own = workers_[index(initiator)];
  if (threshold_ == 0) {
    return Reference{own.count, own.progress()};
  }
  std::vector<double> counts;
  std::vector<double> progress;
  counts.reserve(workers.size());
  progress.reserve(workers.size());
  for (const int worker : workers) {
    counts.push_back(workers_[index(worker)].count);
    progress.push_back(workers_[index(worker)].progress());
  }
  return Reference{std::max(own.count, upperMiddle(std::move(counts))),
                   std::max(own.progress(), upperMiddle(std::move(progress)))};
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
