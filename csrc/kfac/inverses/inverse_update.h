// InverseUpdate makes new inverses of the factors in steps that are due, and brings them to the ranks that use them.
//
// The path of the data. Buckets of factors come one by one (factor_exchange.h), and a factor is inverted as soon as its
// bucket is here. An inverse leaves as soon as it is there, point to point (inverse_exchange.h). The caller of run()
// learns of each layer whose inverses are there, while later ones travel. Only d-kfac, the plain algorithm, waits for
// all each time. Ranks that share a host's memory exchange inverses together, once all are made.
//
// On an accelerator a rank collects its inversions and queues them together, those of equal size in one call
// (factor_batch.h). All inverses then travel together, too.
//
// Inverses belong to the ranks that precondition with them. Threads: the engine's lock. Errors of the group as they
// come.
#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <vector>

#include <ATen/ATen.h>

#include "core/kfac/kfac_plan.h"
#include "kfac/comm/kfac_context.h"
#include "kfac/factors/factor_accumulator.h"
#include "kfac/factors/factor_exchange.h"
#include "kfac/inverses/factor_batch.h"
#include "kfac/inverses/inverse_exchange.h"

namespace torchext {

class InverseUpdate {
 public:
  using Ready = std::function<void(int)>;

  // All of them outlive this.
  InverseUpdate(KfacContext& context, const FactorAccumulator& accumulator, FactorExchange& factors,
                const core::KfacPlan& plan);

  // [factor] as they are in force; undefined where one was never made, or is not used here.
  const std::vector<FactorInverse>& inverses() const { return inverses_; }
  // Collective, in a step that updates inverses. ready: called with a layer whose inverses are there.
  void run(const Ready& ready);

  // Collective: a factor's inverse as its owner has it, the same on all ranks.
  FactorInverse ofOwner(std::size_t factor_index);
  // In place of the inverse that is in force, where this rank has a use for it.
  void load(std::size_t factor_index, const FactorInverse& inverse);
  std::size_t bytes() const;

 private:
  const FactorLayout& layout(std::size_t factor_index) const { return accumulator_.layouts()[factor_index]; }
  bool invertsHere(std::size_t factor_index) const { return plan_.factors[factor_index].invertedBy(context_.rank); }
  bool tracesTravel() const;
  void sendTraces();
  at::Tensor tracesOf(std::size_t factor_index) const;
  std::array<at::Tensor, 2> dampingOfLayer(std::size_t first_factor);
  at::Tensor factorOf(std::size_t factor_index) const;
  void invert(std::size_t factor_index, const at::Tensor& damping);
  void invertLayer(std::size_t first_factor);
  void invertCollected();
  void invertBuckets(const Ready& ready);
  void takeInverses(std::size_t end, const Ready& ready);
  void finishInverses(const Ready& ready);

  KfacContext& context_;
  const FactorAccumulator& accumulator_;
  FactorExchange& factors_;
  const core::KfacPlan& plan_;
  InverseExchange inverse_exchange_;
  std::vector<FactorInverse> inverses_;  // [factor]
  std::size_t taken_ = 0;                // factors whose inverses are here, in this update
  const bool in_batches_;                // all of an update at once
  const bool overlaps_;                  // what is there goes on, whatever else is not: not in the plain algorithm
  std::vector<FactorToInvert> collected_;
  std::vector<std::size_t> collected_from_;  // [collected] factor
  at::Tensor traces_;                        // of all factors, summed over ranks, where tracesTravel()
  Communicator::Sum traces_sum_;
};

}  // namespace torchext
