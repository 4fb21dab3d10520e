// Who is too slow for others to wait for: the slowdown filter of Prague's group generator. Private to csrc/core.
//
// The paper compares request counts c_i: w is left out of a division of i when c_i - c_w >= threshold. A count falls
// behind only while others go on without the straggler, and in a small or tightly coupled world they never do: with one
// straggler on each host, or one group of everybody, all counts stay equal and all wait for ever. Progress is therefore
// the count plus the steps that a worker could have made in the time it waited for members of its groups (by its own
// last step time). That part fades over some thresholds' worth of requests, so that the small waits of equal workers
// never add up. With a clock that stands still it is the paper's filter exactly.
//
// Call order: whatever happens to a worker is told as it happens. Times are seconds of one monotonic clock.
#pragma once

#include <cstdint>
#include <vector>

namespace torchext::core {

class SlowdownFilter {
 public:
  // threshold: requests; 0 switches the filter off.
  SlowdownFilter(int workers, std::int64_t threshold);

  void onRequest(int worker, double now);
  void onComplete(int worker, double now);
  // All members of its group have arrived, `seconds` after worker did.
  void onWaited(int worker, double seconds);
  // A pause is no slowness: a worker returns as far behind the foremost as it left.
  void onPause(int worker);
  void onReturn(int worker);

  // What a division compares its candidates with.
  struct Reference {
    double count;     // requests alone: the paper's rule
    double progress;  // with the steps waited
  };
  // Of each the larger one of initiator and of the (upper) middle of workers. The initiator alone is not enough: one
  // slow worker's request would make fast ones wait for another slow one. The foremost would be too much: one worker
  // faster than all others would keep these from meeting each other.
  Reference reference(int initiator, const std::vector<int>& workers) const;
  // worker is threshold or more behind the reference, in requests or in progress.
  bool late(const Reference& reference, int worker) const;
  // worker is threshold or more requests ahead of each of the others; never without others, never with the filter off.
  bool foremostBy(int worker, const std::vector<int>& workers) const;

 private:
  struct Worker {
    double count = 0;      // requests, pauses left out
    double waited = 0;     // steps it could have made while it waited, fading
    double lag = 0;        // behind the foremost count when its pause began
    double step_time = 0;  // seconds from its last completion to its last request; 0: not known
    double completed_at = -1;
    bool computing = false;  // completed_at is the start of the current step
    double progress() const { return count + waited; }
  };

  double threshold_;
  double foremost_ = 0;  // the largest count of all
  std::vector<Worker> workers_;
};

}  // namespace torchext::core
