// InverseExchange: how inverses reach the ranks that precondition with them: by messages, or through memory where all
// ranks share a host's.
//
// An owner packs what it has made into a buffer in which inverses lie by owner, symmetric ones as triangles; receivers
// unpack from the same places. By messages an update is expect(), then send() of each own inverse and take() of each
// other, as they come, finish(). Through memory gather() brings all at once, between the last send() and the first
// take(). On an accelerator exchange() is all of it.
//
// Threads: the engine's lock. Errors of the group as they come.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/ATen.h>

#include "core/kfac/kfac_plan.h"
#include "kfac/base/kfac_options.h"
#include "kfac/comm/kfac_exchange.h"
#include "kfac/factors/factor_accumulator.h"
#include "kfac/linalg/factor_inverse.h"

namespace torchext {

class InverseExchange {
 public:
  // plan, statistics and exchange (null: one rank) outlive this.
  InverseExchange(const core::KfacPlan& plan, const FactorAccumulator& accumulator, InverseForm form,
                  KfacExchange* exchange);

  // Begins an update: asks for what other ranks will send here.
  void expect();
  // One that this rank owns: packed, and on its way to each worker where there are messages. Nothing where it stays.
  void send(std::size_t factor_index, const FactorInverse& inverse);
  // Blocks, where all share memory: those of all owners, at once.
  void gather();
  // Another rank's, once it is here, in place of `inverse`; which stays where its owner has never made one, and where
  // none comes.
  void take(std::size_t factor_index, FactorInverse& inverse);
  // Until what was sent has left.
  void finish() { KfacExchange::wait(sent_); }
  // All of an update in one go, with one question whether each was ever made. inverses: [factor].
  void exchange(std::vector<FactorInverse>& inverses);

  std::size_t bytes() const { return buffer_.defined() ? buffer_.nbytes() : 0; }

 private:
  const FactorLayout& layout(std::size_t number) const { return accumulator_.layouts()[number]; }
  int workers(std::size_t number) const { return plan_.workers[static_cast<std::size_t>(layout(number).layer)]; }
  bool comesHere(std::size_t number) const;
  bool leavesHere(std::size_t number) const { return place_[number] >= 0 && plan_.factors[number].owner == rank_; }
  at::Tensor packed(std::size_t number) const;
  void pack(std::size_t number, const FactorInverse& inverse);
  FactorInverse unpacked(std::size_t number) const;

  const core::KfacPlan& plan_;
  const FactorAccumulator& accumulator_;
  InverseForm form_;
  KfacExchange* exchange_;
  int rank_;
  at::Tensor buffer_;                // what travels, by owner
  std::vector<std::int64_t> place_;  // [factor] in it, -1: does not travel
  std::vector<KfacExchange::Work> sent_;
  std::vector<KfacExchange::Work> coming_;  // [factor]
};

}  // namespace torchext
