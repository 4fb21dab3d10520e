// Which gradients travel together: tensor fusion for DeAR, and what a fusion costs
// (Zhang et al., "DeAR", ICDCS 2023: decoupled all-reduce and its tensor fusion; the cost model is that of MG-WFBP, Shi
// et al., INFOCOM 2019).
//
// Tensors are positions 0..L-1 in the order in which the backward pass finishes their gradients; a bucket is a run of
// consecutive ones. All tensors of a plan have one element type and device: make one plan for each. Everything here is
// a pure value, computed alike by every rank from equal arguments; nothing measures, sends or allocates buffers.
// Sizes are bytes, times are seconds. Errors: std::invalid_argument on a bad argument, std::out_of_range on an index.
#pragma once

#include <cstddef>
#include <vector>

namespace torchext::core {

// Tensors first .. first + count - 1, and their bytes together.
struct Bucket {
  int first = 0;
  int count = 0;
  std::size_t bytes = 0;
  friend bool operator==(const Bucket&, const Bucket&) = default;
};

// The buckets of a model: in order, disjoint, none empty, covering all tensors. Bucket 0 is the first to be reduced and
// the last that the next forward pass needs. O(L).
class BucketPlan {
 public:
  // Greedy: a bucket takes the next tensor as long as it stays within limit_bytes. A tensor larger than that is alone.
  // There must be one tensor at least, and limit_bytes 1 or more. Tensors of 0 bytes are allowed.
  BucketPlan(std::vector<std::size_t> tensor_bytes, std::size_t limit_bytes);
  // ends[i] is one past the last tensor of bucket i: strictly ascending, the first 1 or more, the last L.
  static BucketPlan fromEnds(std::vector<std::size_t> tensor_bytes, const std::vector<int>& ends);

  int tensorCount() const { return static_cast<int>(tensor_bytes_.size()); }
  int bucketCount() const { return static_cast<int>(buckets_.size()); }
  const Bucket& bucket(int bucket) const;
  int bucketOf(int tensor) const;
  // Where tensor begins in its bucket, and how long it is. Tensors lie there in order, without gaps.
  std::size_t offsetBytes(int tensor) const;
  std::size_t tensorBytes(int tensor) const;
  std::size_t totalBytes() const;
  // Mean over buckets, rounded up: the limit at which a tuner starts from this plan.
  std::size_t meanBucketBytes() const;

 private:
  explicit BucketPlan(std::vector<std::size_t> tensor_bytes);
  void addBucket(int end);

  std::vector<std::size_t> tensor_bytes_;
  std::vector<Bucket> buckets_;
  std::vector<int> bucket_of_;             // [tensor]
  std::vector<std::size_t> offset_bytes_;  // [tensor]
};

// The forward pass as a list of module calls in the order of their execution, each with the tensors that it reads. A
// tensor may be read by several calls (tied weights), a module may be called twice: both just appear again.
struct GatherSchedule {
  // All buckets, in the order in which the forward pass first needs them; those that no call reads come last.
  std::vector<int> order;
  // [call] the buckets that must be complete before it starts, each once, in ascending order of number.
  std::vector<std::vector<int>> waits_for;
};
// O(L + tensors read). Throws std::out_of_range on a tensor that the plan does not have.
GatherSchedule gatherSchedule(const BucketPlan& plan, const std::vector<std::vector<int>>& tensors_of_call);

// Alpha-beta cost of one collective: start-up time plus bytes over bandwidth. Both must be finite and 0 or more.
// A ring of n ranks with link latency a and bandwidth B: alpha = (n-1) a, beta = (n-1) / (n B), for each of
// reduce-scatter and all-gather.
struct AlphaBeta {
  double alpha = 0;  // seconds
  double beta = 0;   // seconds a byte
  double seconds(std::size_t bytes) const { return alpha + beta * static_cast<double>(bytes); }
};

// One iteration, from the start of a backward pass to the end of the next forward pass, without communication.
struct StepModel {
  AlphaBeta reduce_scatter;
  AlphaBeta all_gather;
  // [tensor] when its gradient is finished, from the start of the backward pass: not descending.
  std::vector<double> ready;
  // The whole backward pass: ready.back() or more.
  double backward_seconds = 0;
  // [call] of the forward pass, in order of execution; both of the same length.
  std::vector<double> forward_seconds;
  std::vector<std::vector<int>> forward_tensors;
};

struct StepTimes {
  double reduce_scatter_end = 0;  // all from the start of the backward pass
  double all_gather_end = 0;
  double forward_end = 0;  // the iteration time
};

// When the last bucket is reduced: buckets go one after the other, each from the moment that its last gradient is
// finished. ready as in StepModel. O(L).
double reduceScatterEnd(const BucketPlan& plan, const std::vector<double>& ready, const AlphaBeta& cost);

// The iteration time of a plan. All-gathers begin when the backward pass and all reduce-scatters are over, in the order
// of gatherSchedule; a call waits for its buckets and for the call before it. O(L + tensors read).
StepTimes predictStep(const BucketPlan& plan, const StepModel& model);

// The plan with the earliest reduceScatterEnd of all 2^(L-1) plans, exactly:
//   finish(e) = min over s < e of max(ready_e, finish(s)) + alpha + beta * bytes(s+1..e)
// An earlier finish(s) never makes a later one worse, so one value a prefix is enough. Of the optimal plans it is one
// of few buckets: from the last to the first each is as large as the optimum allows. O(L^2) time, O(L) memory.
struct OptimalFusion {
  BucketPlan plan;
  double reduce_scatter_end;
};
OptimalFusion optimalFusion(const std::vector<std::size_t>& tensor_bytes, const std::vector<double>& ready,
                            const AlphaBeta& cost);

}  // namespace torchext::core
