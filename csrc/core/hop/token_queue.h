// TokenQueue bounds how far a Hop worker runs ahead of a neighbour (Luo et al., ASPLOS 2019, section 4.2).
//
// One TokenQueue for every edge: for its in-neighbour `consumer` worker `owner` keeps TokenQ(owner -> consumer), which
// begins with max_ig tokens. Every time owner enters an iteration it gives one; before consumer enters its next it
// takes one from the queue of each of its out-neighbours. Hence always
//   size = max_ig + Iter(owner) - Iter(consumer),
// and, since a size is never negative, Iter(consumer) - Iter(owner) <= max_ig. The size never exceeds
// capacity = max_ig (1 + len(owner -> consumer)), as owner's lead is bounded along that path.
//
// Skipping (section 5): a consumer whose smallest queue has max_ig + lag tokens is lag iterations behind all its
// out-neighbours. A jump from k to k + J is: take J - 1 tokens from each queue and give J - 1 to the own consumers (now
// it stands at k + J - 1), renew the model with what arrived for k + J - 1, then the step to k + J like any other. With
// J <= lag nobody waits for the models it does not send: all who would receive them have passed.
//
// A counter without locks: blocking, messages and threads are the caller's. On several machines the counter lives at
// the consumer, and tokens under way are missing from it: the identity then holds for size + tokens under way.
#pragma once

namespace torchext::core {

class TokenQueue {
 public:
  // path_length: len(owner -> consumer), edges. std::invalid_argument unless both are 1 or more. A self loop has no
  // queue.
  TokenQueue(int max_iteration_gap, int path_length);

  // Owner entered `count` iterations. std::invalid_argument unless count >= 1, std::logic_error when the size would
  // exceed capacity: owner gave tokens without entering, or consumer is another's.
  void give(int count = 1);

  // Whether take(count) would find enough. Always, once released.
  bool canTake(int count = 1) const { return released_ || size_ >= count; }
  // std::invalid_argument unless count >= 1, std::logic_error when there are fewer (and not released).
  void take(int count = 1);

  // Owner has finished training, or died: nobody is held back by it any more. size() stays as it is from now on.
  void release() { released_ = true; }
  bool released() const { return released_; }

  int size() const { return size_; }
  int capacity() const { return capacity_; }
  // Iter(owner) - Iter(consumer); how far behind consumer is.
  int lag() const { return size_ - max_iteration_gap_; }

 private:
  int max_iteration_gap_;
  int capacity_ = 0;
  int size_;
  bool released_ = false;
};

}  // namespace torchext::core
