// RoundCounter counts a worker's steps and the rounds that they close, and makes up for rounds that only others took.
//
// With a schedule each round runs by itself once its step is taken. A worker that took fewer steps than others (a
// gradient scaler skipped some) makes up for the rounds at the next collective call of the synchronizer. One that is
// ahead may wait for such a round, and come to the call only afterwards: it tells all ranks its step
// (AttachableBackend::tellStep), and who waits in the call makes the rounds up to that one. These are rounds of steps
// that somebody has taken, so which rounds are made does not depend on who waits for whom, nor for how long.
//
// Where the group takes the place of one that failed, workers are some steps apart. Each keeps its number, so that all
// have the same when they have come to the same place of the script; those behind make theirs without rounds.
//
// Threads: the training thread.
#pragma once

#include <cstdint>
#include <functional>

#include "c10d/backend/attachable_backend.h"

namespace torchext {

class RoundCounter {
 public:
  // The group outlives this object. period: steps of a round. channel: tells the group's models apart.
  RoundCounter(AttachableBackend& group, std::int64_t period, int channel)
      : group_(group), period_(period), channel_(channel) {}

  std::int64_t steps() const { return steps_; }
  void stepped() { ++steps_; }
  // The group is a new one, in which all have met: rounds of steps up to `furthest` are nobody's any more.
  void resume(std::int64_t own, std::int64_t furthest);

  // Whether that step closes a round.
  bool closesAt(std::int64_t step) const { return group_.getSize() > 1 && step % period_ == 0 && step > resumed_from_; }
  // That the last step has closed, from 0.
  std::int64_t round() const { return steps_ / period_ - 1; }

  // Tells all ranks that this one waits for others, after so many steps.
  void tell() { group_.tellStep(channel_, meetings_, steps_); }
  // Collective: all have made as many steps, and their rounds, when it returns. make: a round that this worker has not
  // made.
  void catchUp(const std::function<void(std::int64_t round)>& make);

 private:
  std::int64_t arrive(const std::function<void(std::int64_t round)>& make);
  void makeUpTo(std::int64_t steps, const std::function<void(std::int64_t round)>& make);

  AttachableBackend& group_;
  const std::int64_t period_;
  const int channel_;
  std::int64_t steps_ = 0;
  std::uint32_t meetings_ = 0;  // how often all have caught up; the same on all ranks
  std::int64_t resumed_from_ = 0;
};

}  // namespace torchext
