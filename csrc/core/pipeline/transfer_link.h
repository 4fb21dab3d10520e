// TransferLink is one direction between two stages: what was sent meets what was posted, the first with the first.
//
// One transfer moves at a time. It can begin once it has been sent, the sender knows that its receive is posted, and
// the one before has arrived. When it does begin is up to TransferNetwork.
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>
#include <vector>

#include "core/base/check.h"

namespace torchext::core {

class TransferLink {
 public:
  static constexpr double kUnknown = std::numeric_limits<double>::infinity();

  // always_posted: receives are, from the start, and the sender knows it.
  TransferLink(double seconds, std::size_t microbatches, bool always_posted)
      : seconds_(seconds), posted_(microbatches, 0.0), arrived_(microbatches, kUnknown) {
    sent_.reserve(microbatches);
    posted_count_ = always_posted ? microbatches : 0;
    announced_ = posted_count_;
  }

  void send(int microbatch, double now) { sent_.push_back({microbatch, now}); }
  void post(double now) { posted_[posted_count_++] = now; }

  // When the next receive was posted of which the sender does not know; kUnknown: there is none.
  double unannounced() const {
    if (announced_ == posted_count_) {
      return kUnknown;
    }
    return posted_[announced_];
  }
  // The sender knows of that receive from then on.
  void announce(double seconds) { posted_[announced_++] = seconds; }

  // When the next transfer can begin, by this link alone; kUnknown: not yet.
  double ready() const {
    return moved_ < std::min(sent_.size(), announced_) ? std::max({free_, sent_[moved_].seconds, posted_[moved_]})
                                                       : kUnknown;
  }
  // The next transfer begins then.
  void move(double begin_seconds) {
    free_ = begin_seconds + seconds_;
    arrived_[index(sent_[moved_++].microbatch)] = free_;
  }

  // kUnknown until it has begun.
  double arrived(int microbatch) const { return arrived_[index(microbatch)]; }
  double seconds() const { return seconds_; }

 private:
  struct Sent {
    int microbatch = 0;
    double seconds = 0;
  };

  double seconds_;
  double free_ = 0;
  std::vector<Sent> sent_;
  std::vector<double> posted_;  // when; of announced ones, when the sender knows it
  std::size_t posted_count_ = 0;
  std::size_t announced_ = 0;
  std::size_t moved_ = 0;
  std::vector<double> arrived_;  // [micro-batch]
};

}  // namespace torchext::core
