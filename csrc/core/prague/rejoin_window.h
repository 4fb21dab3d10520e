// RejoinWindow says who is waited for after a call that all have made. Private to csrc/core: Prague's generator uses
// it.
//
// A worker in a collective is in nobody's group until it asks again. Where a script has one after every step, whoever
// asks first would find all others away, average with nobody, and be away itself when they ask. But when all have come
// to a collective, all come out of it. So those that ask wait until the others have asked, too.
//
// - Met: it has paused in front of a call that all make. Until it asks.
// - Awaited: all had met, none of them missed, and it has not asked since. While anybody is, those that ask wait.
// - Missed: it was awaited for too long. Until it asks; before that all cannot have met.
//
// Who asks after a meeting has come out of the call that the awaited are in, so that these do not need it to come out,
// too. What they do then is the script's: one may train no more, or come to the next call without having asked, where
// it does need those that ask. Hence the limit: from the meeting on others may take twice as long as the first that
// asked, or a tenth of a second more. In step with a collective after each step that costs nothing, for there the first
// would wait as long.
//
// Who waits cannot meet. So when all meet again, each of them has asked since they met last: nobody counts as there who
// has not come yet. Otherwise one that is late would be held for those that are in the next call and need it there.
//
// Call order: whatever happens to a worker is told as it happens. Times are seconds of one monotonic clock.
#pragma once

#include <optional>
#include <vector>

namespace torchext::core {

class RejoinWindow {
 public:
  // longest: seconds that anybody is waited for at most; 0: nobody is.
  RejoinWindow(int workers, double longest);

  void onMeet(int worker, double now);
  void onRequest(int worker, double now);
  void onLeave(int worker);
  // From the deadline on nobody is awaited.
  void expire(double now);

  bool open() const { return awaited_ > 0; }
  // Nothing while nobody waits.
  std::optional<double> deadline() const { return deadline_; }

 private:
  struct Worker {
    bool gone = false;
    bool met = false;
    bool awaited = false;
    bool missed = false;
  };

  void clear(Worker& worker);

  double longest_;
  std::vector<Worker> workers_;
  int living_;
  int met_ = 0;  // how many are; the same below
  int awaited_ = 0;
  int missed_ = 0;
  double met_at_ = 0;  // when all had met
  std::optional<double> deadline_;
};

}  // namespace torchext::core
