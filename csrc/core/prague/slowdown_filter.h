// SlowdownFilter tells Prague's group generator who is too slow for others to wait for. Private to csrc/core.
//
// The paper compares request counts c_i: w is left out of a division of i when c_i - c_w >= threshold. Two things are
// missing there. A count falls behind only while others go on without the straggler, and in a small or tightly coupled
// world they never do: with one straggler on each host, or one group of everybody, all counts stay equal and all wait
// for ever. And counts of equal workers drift apart by chance; once they are a threshold apart, these would never meet
// again. Hence:
// - Progress is the count plus the steps that a worker could have made in the time it waited for members of its groups.
//   A step is the time between two requests less those waits: computing alone would be next to nothing where averages
//   run under it, and every small wait would count as many steps.
// - Both fade over some thresholds' worth of requests, the count towards the middle of all: what counts is how fast a
//   worker is, not how far it got.
//
// Call order: whatever happens to a worker is told as it happens. Times are seconds of one monotonic clock.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace torchext::core {

class SlowdownFilter {
 public:
  // threshold: requests; 0 switches the filter off.
  SlowdownFilter(int workers, std::int64_t threshold);

  void onRequest(int worker, double now);
  // All members of its group have arrived, `seconds` after worker did.
  void onWaited(int worker, double seconds);
  // A pause is no slowness: a worker returns as far from the middle as it left, to make its next request.
  void onPause(int worker);
  void onReturn(int worker);

  // What a division compares its candidates with.
  struct Reference {
    double count;     // requests alone
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
  double middleCount() const;  // of the active workers, the upper one of two
  struct Worker {
    double count = 0;   // requests, pauses left out, drawn to the middle of all
    double waited = 0;  // steps it could have made while it waited, fading
    double ahead = 0;   // of the middle count when its pause began
    bool active = true;
    double in_groups = 0;                // seconds waited for members since its last request
    std::optional<double> requested_at;  // unless it paused since
    double progress() const { return count + waited; }
  };

  double threshold_;
  std::vector<Worker> workers_;
};

}  // namespace torchext::core
