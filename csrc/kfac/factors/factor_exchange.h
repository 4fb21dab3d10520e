// FactorExchange makes the sums of a step's factors, brings those of all ranks together, and merges them.
//
// The path of the data. add() takes a call's input and gradient into this step's sums (factor_accumulator.h). Factors
// travel only in steps that make inverses. There a factor is packed as soon as its layer has had as many calls as in
// the steps before. A bucket of factors (core/kfac/kfac_plan.h) leaves when its last one is packed, while the backward
// pass goes on. Buckets leave in the order of the plan on every rank, the rest of them in startRest(). They are waited
// for one by one. A layer that is called once more when its factors have left makes its rank ask, by vote(), for all to
// be sent again. After the vote merge() takes the sums into the running averages, and endBuckets() ends the exchange.
//
// Ranks that share a host's memory send nothing early: sumAtOnce() adds all factors in one pass of step(). That
// takes less time than the threads of sockets would take from the backward pass.
//
// Every rank owns the running averages of its own batches. The sum over ranks exists in summed() alone.
//
// Threads: the engine's lock, in autograd's thread or the caller's. Errors of the group as they come.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/ATen.h>

#include "core/kfac/kfac_plan.h"
#include "kfac/comm/kfac_context.h"
#include "kfac/factors/factor_accumulator.h"

namespace torchext {

class FactorExchange {
 public:
  // All of them outlive this.
  FactorExchange(KfacContext& context, FactorAccumulator& accumulator, const core::KfacPlan& plan);

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

  // How many buckets have left.
  std::size_t started() const { return sums_.size(); }
  // Twice is harmless.
  void waitForBucket(std::size_t bucket) { sums_[bucket].wait(); }
  // Waits for all that have left, and ends the exchange: factors may be packed again.
  void endBuckets();

  // Takes a step's sums into the running averages, once all ranks are known to do so.
  void merge(double loss_scale);

  // Of the ranks, laid out as the running averages; with one rank these.
  const at::Tensor& summed() const { return context_.comm ? payload_ : accumulator_.running(); }
  // Makes a mean of a factor in it.
  double divisor(std::size_t factor_index) const;
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
  FactorAccumulator& accumulator_;
  const core::KfacPlan& plan_;
  at::Tensor payload_;                     // what is summed over ranks, laid out as the running averages
  at::Tensor shares_;                      // of other ranks, in factors that this one adds up
  std::vector<std::int64_t> share_place_;  // [factor] in those of one rank, -1: added up elsewhere or by the group
  std::vector<Calls> calls_;               // [layer]
  std::vector<bool> prepared_;             // [factor] packed for this step's exchange
  std::vector<Communicator::Sum> sums_;    // of buckets that have left
  bool scaled_loss_ = false;
  bool stale_ = false;  // a factor was packed before all of its step was known
};

}  // namespace torchext
