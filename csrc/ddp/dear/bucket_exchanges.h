// BucketExchanges sends the buckets of an attached model and takes what comes back, up to the end of the group.
//
// A bucket's way on the wire, in a training step:
//   expectReduction()      a backward pass is coming
//   reduceScatter(bucket)  its gradients are packed and sent, buckets in the order of the backward pass
//   waitReduced(bucket)    this rank's slices of the averaged gradients are in the bucket
//   gatherAll()            every bucket is gathered, in the order of the forward pass: gradients, or stepped parameters
//   waitGathered(tensors)  what was gathered has been unpacked
//   noteStep()             a step has used what came
// buckets() are null under plain DDP, and after the end. There is nothing to send then.
//
// Errors: an exchange that fails ends all waits, and all later ones, with the group's one reason.
// The end: finishSending(), then end(). A signal's handler may do both inside any wait here, on the waiting thread.
//
// Threads: buckets are packed, sent and unpacked on the thread of exchange_, in the order posted. A bucket's buffer is
// that thread's; between reduce-scatter and all-gather the training thread has its own chunk. The methods are called on
// the training thread, in a backward pass on autograd's; addTo() on any.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "c10d/backend/process_group_dear.h"
#include "c10d/transport/shard_transport.h"
#include "ddp/dear/bucket_arrivals.h"
#include "ddp/dear/dear_planner.h"
#include "ddp/dear/dear_stats.h"
#include "ddp/dear/exchange_thread.h"
#include "ddp/dear/shard_buckets.h"

namespace torchext {

class BucketExchanges {
 public:
  using MakeDedicatedGroup = std::function<c10::intrusive_ptr<ProcessGroupDear>()>;
  using Exposed = BucketArrivals::Exposed;

  // Of one bucket: what fills its buffer, which may be none, and what takes the gathered values out of it.
  struct Gather {
    std::function<void()> pack;
    std::function<void()> unpack;
  };

  // Collective. parameters: outlive this. make_dedicated_group: see DearSynchronizer.
  BucketExchanges(c10::intrusive_ptr<ProcessGroupDear> group, const std::vector<at::Tensor>& parameters,
                  bool hierarchical, const MakeDedicatedGroup& make_dedicated_group);
  BucketExchanges(const BucketExchanges&) = delete;
  BucketExchanges& operator=(const BucketExchanges&) = delete;

  // Makes the plan's buckets. Nothing may be under way.
  void rebuild(const DearPlan& plan);
  ShardBuckets* buckets() const { return buckets_.get(); }
  // In the order of the backward pass; after the end, what it was.
  std::size_t bucketCount() const { return arrivals_.size(); }
  // None for what is not exchanged.
  std::optional<std::size_t> bucketOf(std::size_t parameter) const;

  void expectReduction();
  // gradients: of the bucket's tensors; undefined where this rank has none.
  void reduceScatter(std::size_t bucket, std::vector<at::Tensor> gradients);
  void gatherAll(const std::function<Gather(std::size_t bucket)>& gather);

  // Whether waitGathered() and waitAllGathered() return at once. Takes no lock.
  bool quiet() const { return arrivals_.quiet(); }
  // exposed: what the wait is counted as.
  void waitReduced(std::size_t bucket, Exposed exposed = Exposed::kReduceScatter);
  // Until more than `known` buckets have been reduced, or all: how many have.
  std::size_t waitReducedBeyond(std::size_t known);
  void waitGathered(at::IntArrayRef tensors);
  void waitAllGathered();
  // Until nothing is on its way; throws the error of what failed.
  void waitIdle();

  // with_gradients: of a backward pass whose buckets have been posted.
  void noteStep(bool with_gradients);
  // Buckets that no step has used: until they have arrived. They are of no step then.
  void finishUnstepped();
  // Whether another rank waits for gradients of a step that this one has not begun: it will not come to a collective
  // that this rank waits in.
  bool othersTrainOn() const;

  // What the others still wait for is sent, for at most `limit`; what they have not asked for yet need not be. False:
  // there is nothing to end.
  bool finishSending(std::chrono::milliseconds limit);
  void end();
  bool ended() const { return ended_; }
  // After end() throws: what failed, or that the group has ended.
  void checkNotEnded() const;

  void addTo(DearStats& stats) const;

 private:
  void fail(const std::exception_ptr& error);
  void waitUntil(Exposed exposed, const BucketArrivals::Ready& ready);
  std::int64_t begun() const { return stepped_ + (unstepped_ ? 1 : 0); }  // steps, by their backward passes

  const c10::intrusive_ptr<ProcessGroupDear> group_;
  const std::vector<at::Tensor>& parameters_;
  const int channel_;
  c10::intrusive_ptr<ProcessGroupDear> dedicated_group_;
  std::uint64_t failure_callback_ = 0;
  std::unique_ptr<ShardTransport> transfers_;
  std::unique_ptr<ShardBuckets> buckets_;
  std::vector<std::size_t> gather_order_;  // of buckets
  FlightRecord reduction_;                 // of the next backward pass, until its last bucket is posted
  BucketArrivals arrivals_;
  std::int64_t stepped_ = 0;  // steps since attach
  bool unstepped_ = false;    // reduce-scatters have been posted since the last step with gradients
  bool ended_ = false;
  DearStats last_;  // counters, as of the end

  mutable std::mutex end_mutex_;  // guards what addTo() reads against end()
  // Last: ends before what it uses. Null after end(): who waits for it keeps a copy.
  std::shared_ptr<ExchangeThread> exchange_;
};

}  // namespace torchext
