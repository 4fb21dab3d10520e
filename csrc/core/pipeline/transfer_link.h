// TransferLink is one direction between two stages: what was sent meets what was posted, the first with the first.
//
// One transfer moves at a time. It begins once it has been sent, its receive is posted, and the one before has arrived.
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

  // always_posted: receives are, from the start.
  TransferLink(double seconds, std::size_t microbatches, bool always_posted)
      : seconds_(seconds), posted_(microbatches, 0.0), arrived_(microbatches, kUnknown) {
    sent_.reserve(microbatches);
    posted_count_ = always_posted ? microbatches : 0;
  }

  void send(int microbatch, double now) {
    sent_.push_back({microbatch, now});
    move();
  }
  void post(double now) {
    posted_[posted_count_++] = now;
    move();
  }
  // kUnknown until it is both sent and posted.
  double arrived(int microbatch) const { return arrived_[index(microbatch)]; }
  double seconds() const { return seconds_; }

 private:
  struct Sent {
    int microbatch = 0;
    double seconds = 0;
  };

  void move() {
    for (; moved_ < std::min(sent_.size(), posted_count_); ++moved_) {
      free_ = std::max({free_, sent_[moved_].seconds, posted_[moved_]}) + seconds_;
      arrived_[index(sent_[moved_].microbatch)] = free_;
    }
  }

  double seconds_;
  double free_ = 0;
  std::vector<Sent> sent_;
  std::vector<double> posted_;
  std::size_t posted_count_ = 0;
  std::size_t moved_ = 0;
  std::vector<double> arrived_;  // [micro-batch]
};

}  // namespace torchext::core
