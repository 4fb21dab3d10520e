// SharedStats lets the threads of one synchronizer count into one AveragingStats.
//
// Threads: all functions may be called from any.
#pragma once

#include <mutex>

#include "ddp/common/synchronizer.h"

namespace torchext {

class SharedStats {
 public:
  // change(AveragingStats&), under the lock.
  template <class Change>
  void count(Change change) {
    const std::lock_guard<std::mutex> lock(mutex_);
    change(stats_);
  }
  AveragingStats read() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return stats_;
  }

 private:
  mutable std::mutex mutex_;  // guards what follows
  AveragingStats stats_;
};

}  // namespace torchext
