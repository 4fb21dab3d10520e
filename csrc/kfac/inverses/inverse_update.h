// InverseUpdate makes new inverses of the factors in steps that are due, and brings them to the ranks that use them.
//
// The path of the data. Buckets of factors come one by one (factor_exchange.h), and a factor is inverted as soon as its
// bucket is here. Between hosts a thread does so (background_inverses.h), mostly while the backward pass waits for
// DDP's last all-reduces. What it has made is used once all ranks are known to take the step, and made anew if the
// damping was changed in between. An inverse leaves as soon as it is there, point to point (inverse_exchange.h). The
// caller of run() learns of each layer whose inverses are there, while later ones travel. Only d-kfac, the plain
// algorithm, waits for all each time, and has no such thread. Ranks that share a host's memory exchange inverses
// together, once all are made.
//
// On an accelerator a rank collects its inversions and queues them together, those of equal size in one call
// (factor_batch.h). All inverses then travel together, too.
//
// Inverses belong to the ranks that precondition with them. Threads: the engine's lock; that of background inverses
// reads factors that have left, and never takes it. Errors of the group as they come.
#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include <ATen/ATen.h>

#include "core/kfac/kfac_plan.h"
#include "kfac/comm/kfac_context.h"
#include "kfac/factors/factor_accumulator.h"
#include "kfac/factors/factor_exchange.h"
#include "kfac/inverses/background_inverses.h"
#include "kfac/inverses/factor_batch.h"
#include "kfac/inverses/factor_inverter.h"
#include "kfac/inverses/inverse_exchange.h"

namespace torchext {

class InverseUpdate final : public FactorExchange::Follower {
 public:
  // All of them outlive this, which `factors` hands its buckets to where that saves time.
  InverseUpdate(KfacContext& context, std::shared_ptr<FactorAccumulator> accumulator, FactorExchange& factors,
                const core::KfacPlan& plan);

  // [factor] as they are in force; undefined where one was never made, or is not used here.
  const std::vector<FactorInverse>& inverses() const { return inverses_; }
  // Collective, in a step that updates inverses. ready: called with a layer whose inverses are there.
  void run(const std::function<void(int)>& ready);

  // Collective: a factor's inverse as its owner has it, the same on all ranks.
  FactorInverse ofOwner(std::size_t factor_index);
  // In place of the inverse that is in force, where this rank has a use for it.
  void load(std::size_t factor_index, const FactorInverse& inverse);
  std::size_t bytes() const;

  void follow(Communicator::Sum sum, std::size_t end) override;
  void waitFor(std::size_t buckets) override;
  void end() override;

 private:
  using Ready = std::function<void(int)>;
  bool invertsHere(std::size_t factor_index) const { return plan_.factors[factor_index].invertedBy(context_.rank); }
  bool tracesTravel() const;
  bool madeInBackground() const;
  void sendTraces();
  at::Tensor tracesOf(std::size_t factor_index) const;
  std::array<at::Tensor, 2> dampingOfLayer(std::size_t first_factor);
  void invert(std::size_t factor_index, const at::Tensor& damping);
  void invertLayer(std::size_t first_factor, const Ready& ready);
  void collect(std::size_t factor_index, const at::Tensor& damping);
  void invertCollected();
  void invertBuckets(const Ready& ready);
  void takeInverses(std::size_t end, const Ready& ready);
  void finishInverses(const Ready& ready);

  KfacContext& context_;
  std::shared_ptr<FactorAccumulator> accumulator_;
  FactorExchange& factors_;
  const core::KfacPlan& plan_;
  FactorInverter inverter_;
  InverseExchange inverse_exchange_;
  std::vector<FactorInverse> inverses_;  // [factor]
  std::size_t taken_ = 0;                // factors whose inverses are here, in this update
  const bool in_batches_;                // all of an update at once
  const bool overlaps_;                  // what is there goes on, whatever else is not: not in the plain algorithm
  std::vector<FactorToInvert> collected_;
  std::vector<std::size_t> collected_from_;  // [collected] factor
  at::Tensor traces_;                        // of all factors, summed over ranks, where tracesTravel()
  Communicator::Sum traces_sum_;
  std::unique_ptr<BackgroundInverses> background_;  // made when first needed
  std::size_t followed_ = 0;                        // factors whose inversion has been asked for
  double followed_damping_ = 0;                     // with which they are inverted
};

}  // namespace torchext
