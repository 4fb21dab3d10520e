// FactorExchange makes the sums of a step's factors, brings those of all ranks together, and merges them.
//
// The path of the data. add() takes a call's input and gradient into this step's sums (factor_accumulator.h). Factors
// travel only in steps that make inverses. There a factor is packed as soon as its layer has had as many calls as in
// the steps before. A bucket of factors (core/kfac/kfac_plan.h) leaves when its last one is packed, while the backward
// pass goes on. Buckets leave in the order of the plan on every rank, the rest of them in startRest(). They are waited
// for one by one, or handed to a follower as they leave. A layer that is called once more when its factors have left
// makes its rank ask, by vote(), for all to be sent again. After the vote merge() takes the sums into the running
// averages, and endBuckets() ends the exchange.
//
// Ranks that share a host's memory send nothing early: sumAtOnce() adds all factors in one pass of step(). That
// takes less time than the threads of sockets would take from the backward pass.
//
// Every rank owns the running averages of its own batches. The sum over ranks exists in summed() alone.
//
// Threads: the engine's lock, in autograd's thread or the caller's. A follower's thread reads what has left, between
// follow() and endBuckets(). Errors of the group as they come.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/ATen.h>

#include "core/kfac/kfac_plan.h"
#include "kfac/comm/kfac_context.h"
#include "kfac/factors/factor_accumulator.h"
#include "kfac/factors/ready_clock.h"

namespace torchext {

class FactorExchange {
 public:
  // Takes buckets as they leave, and waits for them in place of this object.
  class Follower {
   public:
    Follower() = default;
    Follower(const Follower&) = delete;
    Follower& operator=(const Follower&) = delete;
    virtual ~Follower() = default;
    // The step's next bucket; its last factor is the one before `end`. Never blocks.
    virtual void follow(Communicator::Sum sum, std::size_t end) = 0;
    // Until the first `buckets` are here.
    virtual void waitFor(std::size_t buckets) = 0;
    // Returns when what has left may be written again.
    virtual void end() = 0;
  };

  // All of them outlive this.
  FactorExchange(KfacContext& context, std::shared_ptr<FactorAccumulator> accumulator, const core::KfacPlan& plan);
  // Outlives this. Without one this object waits.
  void handOverTo(Follower* follower) { follower_ = follower; }

  // A call of a layer in a backward pass. may_leave: whether its sums are there for whoever sends from this thread.
  void add(int layer, const at::Tensor& input, const at::Tensor& gradient, int backward_pass, bool may_leave);
  // What has left already was taken for that of a plain loss.
  void noteLossScale(double loss_scale);

  // Sends what has not left yet.
  void startRest(double loss_scale);
  // What all ranks say of a step that sends factors, and `beside` of each, [ranks, elements]. Blocks.
  struct Votes {
    int differing = -1;  // the first rank that does not do with the step as this one does; -1: none
    bool again = false;  // a rank has sent factors that are not those of the whole step: all must send again
    at::Tensor beside;
  };
  Votes vote(bool takes_step, const at::Tensor& beside);
  // Of a Communicator that sums at once: all factors, of each only what this rank needs the sum of. Nothing elsewhere.
  void sumAtOnce();

  std::size_t started() const { return started_; }
  void waitForBucket(std::size_t bucket);
  void waitForBuckets();
  void endBuckets();

  // Takes a step's sums into the running averages, once all ranks are known to do so.
  void merge(double loss_scale);
  // Whether sums may be put off to the end of the backward pass, in steps that send none: there DDP's all-reduces are
  // waited for. Work of a device is queued at once.
  bool maySumLater() const { return context_.comm && !context_.on_device; }
  // Drops the step's sums.
  void discard() { accumulator_->discard(); }
  // Whatever has become of the step.
  void endStep();
  // After some steps that sent, once: when each factor was ready, as rank 0 saw it. Collective then.
  std::optional<std::vector<double>> readyTimes();

  // Of the ranks, laid out as the running averages; with one rank these. What makes a mean of each factor in it.
  at::Tensor summed() const { return context_.comm ? payload_ : accumulator_->running(); }
  std::vector<double> divisors() const;
  // Collective: the mean over ranks of the running averages; where a factor is its owner's own, that.
  at::Tensor mean();
  std::size_t bytes() const;

 private:
  struct Calls {
    int expected = -1;
    bool stable = false;
  };
  void placeShares();
  void prepare(std::size_t factor_index, double loss_scale);
  void startBuckets(bool overlapped);
  Communicator::Sum startBucket(std::size_t begin, std::size_t end);

  KfacContext& context_;
  std::shared_ptr<FactorAccumulator> accumulator_;
  const core::KfacPlan& plan_;
  Follower* follower_ = nullptr;
  at::Tensor payload_;                     // what is summed over ranks, laid out as the running averages
  at::Tensor shares_;                      // of other ranks, in factors that this one adds up
  std::vector<std::int64_t> share_place_;  // [factor] in those of one rank, -1: added up elsewhere or by the group
  std::vector<Calls> calls_;               // [layer]
  std::vector<bool> prepared_;             // [factor] packed for this step's exchange
  std::size_t started_ = 0;                // buckets that have left
  std::vector<Communicator::Sum> sums_;    // [bucket] none where a follower has them
  bool scaled_loss_ = false;
  bool stale_ = false;  // a factor was packed before all of its step was known
  ReadyClock ready_;    // by factor, in steps that send factors
  int profiled_ = 0;    // such steps
  bool profiling_;
};

}  // namespace torchext
