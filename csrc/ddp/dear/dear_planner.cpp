#include "ddp/dear/dear_planner.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <utility>

#include <c10/util/Logging.h>

#include "c10d/threads/outstanding_averages.h"
#include "core/base/check.h"
#include "core/dear/bucket_ends.h"
#include "core/dear/step_times.h"
#include "ddp/common/elapsed.h"

namespace torchext {
namespace {

constexpr double kMebibyte = 1 << 20;
// DDP builds its buckets anew after the first step, allocators and connections warm up.
constexpr int kWarmUpSteps = 3;
// Of every trial: the first of them pays for the change and is not counted.
constexpr int kWindowSteps = 10;
// After so many trials a search that is that far behind all-reduce is given up.
constexpr std::size_t kPatientTrials = 4;
constexpr double kHopeless = 1.1;
// No further apart than this the two are measured in turn, in so many windows each.
constexpr double kClose = 1.25;
constexpr std::size_t kConfirmations = 3;
// There buckets must win by so many standard errors of the difference: where steps vary, who wins by chance is the
// slower one as often as not, and all-reduce loses nothing.
constexpr double kStandardErrors = 2;
// A decision is looked at first after so many passes, then after twice as many each time; by the median of the steps in
// the last few, which pauses between steps (an evaluation) do not move.
constexpr std::int64_t kFirstLook = 100;
constexpr std::int64_t kLookedAt = 50;
// Of a shared plan: numbers in front of its lists.
constexpr std::int64_t kHead = 4;

// buckets: what the first trial cuts the model into, about.
core::BayesianTunerOptions tunerOptions(std::size_t model_bytes, std::size_t buckets) {
  auto tuning = core::BayesianTunerOptions::forModel(std::max<std::size_t>(1, model_bytes));
  const double mebibytes = static_cast<double>(model_bytes) / kMebibyte;
  tuning.start_mb = std::clamp(mebibytes / static_cast<double>(buckets), tuning.min_mb, tuning.max_mb);
  tuning.window_steps = kWindowSteps;
  return tuning;
}

// Each of `all` once: first those that were seen, in that order, then the others (unused in that step) in their own.
std::vector<std::int64_t> completed(const std::vector<std::int64_t>& seen, const std::vector<std::int64_t>& all) {
  std::set<std::int64_t> left(all.begin(), all.end());
  std::vector<std::int64_t> result;
  for (const std::vector<std::int64_t>* list : {&seen, &all}) {
    for (const std::int64_t tensor : *list) {
      if (left.erase(tensor) > 0) {
        result.push_back(tensor);
      }
    }
  }
  return result;
}

std::size_t bytesOf(double mebibytes) { return std::max<std::size_t>(1, std::llround(mebibytes * kMebibyte)); }

}  // namespace

DearPlanner::DearPlanner(ProcessGroupDear& group, std::size_t model_bytes, std::vector<std::int64_t> tensors,
                         double bucket_mb, std::optional<DearPlan> planned)
    : group_(group),
      tensors_(std::move(tensors)),
      fallback_(group.dearOptions().allreduce_fallback && group.getSize() > 1),
      fixed_(!planned && bucket_mb > 0),
      planned_(planned.has_value()),
      tuner_(tunerOptions(model_bytes, planned ? std::max<std::size_t>(1, planned->ends.size()) : 8)),
      next_look_(kFirstLook) {
  if (planned) {
    plan_ = *std::move(planned);
  } else {
    plan_.forward_order = tensors_;
    plan_.gradient_order.assign(tensors_.rbegin(), tensors_.rend());
  }
  plan_.allreduce = fallback_;
  plan_.bucket_bytes = bytesOf(fixed_ ? bucket_mb : tuner_.propose());
  used_ = plan_;
}

bool DearPlanner::afterPass() {
  if (settled()) {
    return false;
  }
  ++passes_;
  // The other ranks count only: their own clocks and steps must not decide when a decision is due.
  if (group_.getRank() == 0) {
    measure();
  }
  return passes_ >= due();
}

void DearPlanner::decide(const std::vector<std::int64_t>& gradient_order,
                         const std::vector<std::int64_t>& forward_order) {
  passes_ = 0;
  next_look_ *= decided() ? 2 : 1;
  const bool chooses = group_.getRank() == 0 && enoughMeasured();
  if (chooses) {
    choose(gradient_order, forward_order);
    window_.clear();
  }
  share();
  if (chooses) {
    last_measured_ = Clock::now();
  }
}

bool DearPlanner::adopt() {
  if (used_ == plan_) {
    return false;
  }
  used_ = plan_;
  return true;
}

// Passes; of trials as many as steps are measured, where each step has one.
std::int64_t DearPlanner::due() const {
  if (decided()) {
    return next_look_;
  }
  return phase_ == Phase::kWarmUp && !planned_ ? kWarmUpSteps : kWindowSteps + 1;
}

bool DearPlanner::enoughMeasured() const {
  const std::size_t wanted = decided() ? 1 : core::index(due());
  return window_.size() >= wanted;
}

void DearPlanner::measure() {
  if (!std::exchange(stepped_, false)) {
    return;  // one of several passes of a step, or of a step that was skipped
  }
  const auto now = Clock::now();
  const std::optional<Clock::time_point> before = std::exchange(last_measured_, now);
  const double seconds = before ? std::max(1e-9, std::chrono::duration<double>(now - *before).count()) : 1.0;
  if (decided() ? passes_ <= next_look_ - kLookedAt : enoughMeasured()) {
    return;
  }
  window_.push_back(seconds);
  if (phase_ == Phase::kTuning && !fixed_) {
    tuner_.report(seconds);
  }
}

void DearPlanner::choose(const std::vector<std::int64_t>& gradient_order,
                         const std::vector<std::int64_t>& forward_order) {
  if (phase_ == Phase::kWarmUp) {
    if (!plan_.ends.empty() && usesPlan(gradient_order)) {
      return;
    }
    plan_.gradient_order = completed(gradient_order, tensors_);
    plan_.forward_order = completed(forward_order, tensors_);
    phase_ = fallback_ ? Phase::kAllreduce : fixed_ ? Phase::kDecided : Phase::kSettling;
    return;
  }
  if (phase_ == Phase::kDecided) {
    lookAgain();
  } else if (phase_ == Phase::kConfirming) {
    confirm();
  } else if (phase_ == Phase::kTuning) {
    tune();
  } else {
    if (phase_ == Phase::kAllreduce) {
      allreduce_seconds_ = core::median({window_.begin() + 1, window_.end()});
      plan_.allreduce = false;
    }
    phase_ = Phase::kTuning;
  }
}

// Whether the planned buckets stay; then the next phase has begun.
bool DearPlanner::usesPlan(const std::vector<std::int64_t>& gradient_order) {
  if (!core::keepsBuckets(plan_.gradient_order, plan_.ends, gradient_order)) {
    LOG(WARNING)
        << "dear: gradients do not come in the order of the plan's " << plan_.ends.size()
        << " buckets, which are given up; sizes of buckets are tried instead. Plan again with the model that is "
        << "trained";
    plan_.ends.clear();
    return false;
  }
  if (fallback_) {
    compareAgain();
  } else {
    phase_ = Phase::kDecided;
  }
  return true;
}

void DearPlanner::tune() {
  best_seconds_ = fixed_ ? core::median({window_.begin() + 1, window_.end()}) : tuner_.best()->step_seconds;
  if (!fixed_) {
    plan_.bucket_bytes = bytesOf(tuner_.propose());
  }
  const bool hopeless =
      fallback_ && tuner_.state().trials.size() >= kPatientTrials && best_seconds_ > kHopeless * allreduce_seconds_;
  if (!fixed_ && !tuner_.done() && !hopeless) {
    return;
  }
  if (!fixed_) {
    plan_.bucket_bytes = bytesOf(tuner_.best()->bucket_mb);
  }
  const double ratio = fallback_ ? allreduce_seconds_ / best_seconds_ : kClose;
  if (ratio > 1 / kClose && ratio < kClose) {
    compareAgain();
  } else {
    settle(allreduce_seconds_ <= best_seconds_);
  }
}

void DearPlanner::compareAgain() {
  phase_ = Phase::kConfirming;
  plan_.allreduce = true;
  confirmed_[0].clear();
  confirmed_[1].clear();
}

// The network, or the machine, may not be what it was when it was measured.
void DearPlanner::lookAgain() {
  if (core::median(window_) > allreduce_seconds_) {
    compareAgain();
  }
}

void DearPlanner::confirm() {
  std::vector<double>& seconds = confirmed_[plan_.allreduce ? 1 : 0];
  seconds.insert(seconds.end(), window_.begin() + 1, window_.end());
  plan_.allreduce = !plan_.allreduce;
  if (confirmed_[0].size() == kConfirmations * kWindowSteps) {  // the second of the two
    best_seconds_ = core::mean(confirmed_[0]);
    allreduce_seconds_ = core::mean(confirmed_[1]);
    settle(!core::clearlyFaster(confirmed_[0], confirmed_[1], kStandardErrors));
  }
}

void DearPlanner::settle(bool allreduce) {
  phase_ = Phase::kDecided;
  plan_.allreduce = fallback_ && allreduce;
  announce();
}

void DearPlanner::announce() const {
  const std::string buckets = plan_.ends.empty()
                                  ? c10::str("buckets of ", static_cast<double>(plan_.bucket_bytes) / kMebibyte, " MiB")
                                  : c10::str("the plan's ", plan_.ends.size(), " buckets");
  if (plan_.allreduce) {
    LOG(WARNING) << "dear: nothing to hide here, or too little to tell: a step takes " << 1e3 * best_seconds_
                 << " ms with " << buckets << " and " << 1e3 * allreduce_seconds_
                 << " ms with plain all-reduce, which is used from now on";
  } else {
    LOG(INFO) << "dear: " << buckets << ", " << 1e3 * best_seconds_ << " ms a step"
              << (fallback_ ? c10::str(" (plain all-reduce: ", 1e3 * allreduce_seconds_, " ms)") : "");
  }
}

void DearPlanner::share() {
  const auto count = static_cast<std::int64_t>(tensors_.size());
  at::Tensor message = at::zeros({kHead + 3 * count}, at::kLong);
  auto* data = message.mutable_data_ptr<std::int64_t>();
  if (group_.getRank() == 0) {
    data[0] = static_cast<std::int64_t>(phase_);
    data[1] = plan_.allreduce ? 1 : 0;
    data[2] = static_cast<std::int64_t>(plan_.bucket_bytes);
    data[3] = static_cast<std::int64_t>(plan_.ends.size());
    std::copy(plan_.gradient_order.begin(), plan_.gradient_order.end(), data + kHead);
    std::copy(plan_.forward_order.begin(), plan_.forward_order.end(), data + kHead + count);
    std::copy(plan_.ends.begin(), plan_.ends.end(), data + kHead + 2 * count);
  }
  if (group_.getSize() > 1) {
    const InternalCollective internal;
    std::vector<at::Tensor> tensors{message};
    group_.broadcast(tensors, c10d::BroadcastOptions())->wait();
  }
  phase_ = static_cast<Phase>(data[0]);
  plan_.allreduce = data[1] != 0;
  plan_.bucket_bytes = static_cast<std::size_t>(data[2]);
  plan_.gradient_order.assign(data + kHead, data + kHead + count);
  plan_.forward_order.assign(data + kHead + count, data + kHead + 2 * count);
  plan_.ends.assign(data + kHead + 2 * count, data + kHead + 2 * count + data[3]);
}

}  // namespace torchext
