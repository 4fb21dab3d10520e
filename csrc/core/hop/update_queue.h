// UpdateQueue knows the models that arrived at one Hop worker (Luo et al., ASPLOS 2019, sections 4.1 and 5): which are
// kept, where their bytes go, and what the worker may average now.
//
// It holds tags, senders and slot numbers, not bytes: the owner allocates capacity() buffers once, and slot numbers are
// 0..capacity() - 1. Slots rotate: a sender's model of iteration k goes to the sender's slot k mod (max_ahead + 1), so
// memory is bounded by capacity = (1 + max_ahead) |N_in| models.
//
// Call order
//   receiver   admit(sender, tag) when a model is announced. kStore: write its bytes to slotOf(sender, tag), then
//              enqueue(sender, tag). kDrop: it is too old, throw the bytes away. kWait: the slot is being read; ask
//              again after release. Tags of one sender ascend. One model of a sender at a time.
//   worker     advance(k) when it enters iteration k, before it gives its tokens; enqueue of its own model like any
//              other (it is its own in-neighbour). When ready(): dequeue(), read the slots, release().
// What may be dequeued at iteration k:
//   standard      tag k of all in-neighbours
//   backup b      tag k of |N_in| - b of them or more; all that are there are taken, and the weights are W_ji over
//                 their sum (1 / count where they are equal)
//   staleness s   the newest of each in-neighbour, tag >= k - s, taken again in the next iteration if nothing newer has
//                 arrived by then; weights in proportion to W_ji (tag - (k - s) + 1), which is the paper's on a regular
//                 graph, and where all are equally far keeps the mean on any
// Tags below k (staleness: below k - s) are stale: dropped when met, by admit, advance or dequeue.
// A sender that has left is not waited for: what it sent before still counts, and where nothing of it is left its share
// goes to the others.
//
// Threads: none; a caller with a receiver thread holds one lock around each call, but not while it moves or reads
// bytes: that is what admit and release are for.
#pragma once

#include <cstdint>
#include <vector>

namespace torchext::core {

struct UpdateQueueOptions {
  std::vector<int> senders = {};     // in-neighbours, ascending, the worker itself included
  std::vector<double> weights = {};  // W_ji of each of them, more than 0
  int max_ahead = 1;                 // iterations that a sender can be ahead: largestLead(mode, graph); 0 or more
  int backup_workers = 0;            // 0..senders - 1; not together with staleness
  int staleness = 0;                 // iterations
  std::int64_t first_iteration = 0;  // where training begins or resumes, 0 or more
};

struct Update {
  int sender = -1;
  std::int64_t tag = -1;
  int slot = -1;
  double weight = 0.0;  // those of one dequeue sum to 1
  friend bool operator==(const Update&, const Update&) = default;
};

enum class Admission { kStore, kDrop, kWait };

class UpdateQueue {
 public:
  // std::invalid_argument with the name, the value and what is allowed.
  explicit UpdateQueue(UpdateQueueOptions options);

  int capacity() const { return slots_ * static_cast<int>(senders_.size()); }
  std::int64_t iteration() const { return iteration_; }
  // std::out_of_range when sender is no in-neighbour or tag is negative.
  int slotOf(int sender, std::int64_t tag) const;

  // std::logic_error when the tag is more than max_ahead ahead of iteration() (the sender ran without tokens, or before
  // advance) or not above the sender's last one. kStore takes what the slot held: an older model that only staleness
  // could still have wanted.
  Admission admit(int sender, std::int64_t tag);
  // The admitted model has arrived. std::logic_error without an admit of this tag.
  void enqueue(int sender, std::int64_t tag);

  // No model of the sender will come any more: it has finished training, or died. Harmless twice. std::logic_error
  // while one is arriving.
  void leave(int sender);

  // The worker is at `iteration`. std::logic_error when that is below iteration(), or while slots are being read.
  void advance(std::int64_t iteration);

  // Models that count for ready(): of tag k, or with staleness senders with a tag that is new enough.
  int available() const;
  // Of these, how many dequeue needs: |N_in| - backup_workers, less the senders that have left and of which nothing
  // counts any more; 1 or more.
  int required() const;
  bool ready() const { return available() >= required(); }
  // In ascending order of senders. Their slots stay untouched until release. std::logic_error unless ready(), or when
  // the last ones were not released.
  std::vector<Update> dequeue();
  // All slots of the last dequeue may be written again. Harmless twice.
  void release();

 private:
  struct Sender {
    std::vector<std::int64_t> tags;  // of each slot; kEmpty
    std::int64_t last = -1;          // tag of the last admission
    bool arriving = false;           // `last` is admitted and not enqueued
    int reading = -1;                // slot of it that the worker reads
    bool left = false;
  };

  std::size_t find(int sender) const;
  std::int64_t oldest() const { return iteration_ - options_.staleness; }
  std::size_t turn(std::int64_t tag) const { return static_cast<std::size_t>(tag % slots_); }
  // The tag that dequeue would take of this sender; kEmpty: none.
  std::int64_t candidate(const Sender& sender) const;

  UpdateQueueOptions options_;
  int slots_;  // of each sender
  std::int64_t iteration_;
  bool held_ = false;
  std::vector<Sender> senders_;
};

}  // namespace torchext::core
