#include "ddp/averaging/round_counter.h"

#include <algorithm>
#include <exception>
#include <vector>

#include <ATen/ATen.h>

#include "c10d/backend/delegating_work.h"
#include "c10d/threads/interruptible_wait.h"
#include "c10d/threads/outstanding_averages.h"

namespace torchext {

void RoundCounter::resume(std::int64_t own, std::int64_t furthest) {
  steps_ = own;
  ++meetings_;  // what was told of steps before means nothing now
  resumed_from_ = furthest;
}

// The averaging threads of workers that are ahead wait for the others' rounds.
void RoundCounter::catchUp(const std::function<void(std::int64_t round)>& make) {
  if (group_.getSize() == 1) {
    return;
  }
  try {
    const std::int64_t end = arrive(make);
    makeUpTo(end, make);
    steps_ = end;
    ++meetings_;
  } catch (...) {
    group_.abandonMeeting(std::current_exception());
    throw;
  }
}

// Waits for all the others, and returns the steps of the furthest. One that is ahead cannot come as long as it waits,
// in a round, for this one; it says so, and this one makes up for that round while it waits here.
std::int64_t RoundCounter::arrive(const std::function<void(std::int64_t round)>& make) {
  std::vector<at::Tensor> furthest{at::full({1}, steps_, at::kLong)};
  c10::intrusive_ptr<c10d::Work> work;
  {
    const InternalCollective internal;
    c10d::AllreduceOptions options;
    options.reduceOp = c10d::ReduceOp::MAX;
    work = group_.allreduce(furthest, options);
  }
  auto& all_here = dynamic_cast<DelegatingWork&>(*work);
  while (!all_here.overWithin(kSignalCheckInterval)) {
    checkSignals();
    makeUpTo(group_.furthestStep(channel_, meetings_), make);
  }
  work->wait();  // throws what has gone wrong
  return furthest[0].item<std::int64_t>();
}

void RoundCounter::makeUpTo(std::int64_t steps, const std::function<void(std::int64_t round)>& make) {
  for (std::int64_t round = std::max(steps_, resumed_from_) / period_; round < steps / period_; ++round) {
    make(round);
    steps_ = (round + 1) * period_;
  }
}

}  // namespace torchext
