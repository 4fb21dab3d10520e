#include "core/hop/token_queue.h"

#include <limits>

#include "core/base/check.h"

namespace torchext::core {
namespace {

void checkCount(int count) {
  if (count < 1) {
    throwInvalid("count of tokens", count, "1 or more");
  }
}

}  // namespace

TokenQueue::TokenQueue(int max_iteration_gap, int path_length)
    : max_iteration_gap_(max_iteration_gap), size_(max_iteration_gap) {
  if (max_iteration_gap < 1) {
    throwInvalid("max_iteration_gap", max_iteration_gap, "1 or more with token queues");
  }
  if (path_length < 1) {
    throwInvalid("path_length", path_length, "1 or more: a worker has no token queue for itself");
  }
  if (path_length >= std::numeric_limits<int>::max() / max_iteration_gap) {
    throwInvalid("max_iteration_gap", max_iteration_gap, concat("less: path_length is ", path_length));
  }
  capacity_ = max_iteration_gap * (1 + path_length);
}

void TokenQueue::give(int count) {
  checkCount(count);
  if (released_) {
    return;
  }
  if (count > capacity_ - size_) {
    throw std::logic_error(concat("token queue: ", count, " tokens given, but only ", capacity_ - size_, " of ",
                                  capacity_, " fit: an owner gives one for each iteration it enters"));
  }
  size_ += count;
}

void TokenQueue::take(int count) {
  checkCount(count);
  if (released_) {
    return;
  }
  if (count > size_) {
    throw std::logic_error(
        concat("token queue: ", count, " tokens taken, but there are ", size_, ": ask canTake first, and wait"));
  }
  size_ -= count;
}

}  // namespace torchext::core
