// InverseExchange brings inverses to the ranks that precondition with them.
//
// An owner packs what it has made into a buffer in which inverses lie by owner, symmetric ones as triangles. Receivers
// unpack from the same places. An update is expect(), then send() of each own inverse, flush(), take() of each other,
// finish(). An inverse that travels as a message may be taken before flush().
//
// Threads: the engine's lock. Errors of the group as they come.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/ATen.h>

#include "core/kfac/kfac_plan.h"
#include "kfac/base/kfac_options.h"
#include "kfac/comm/communicator.h"
#include "kfac/factors/factor_accumulator.h"
#include "kfac/linalg/factor_inverse.h"

namespace torchext {

class InverseExchange {
 public:
  // plan, accumulator and comm (null: one rank) outlive this.
  InverseExchange(const core::KfacPlan& plan, const FactorAccumulator& accumulator, InverseForm form,
                  Communicator* comm);

  // Begins an update: asks for what other ranks will send here.
  void expect();
  // One that this rank owns. Nothing where it stays.
  void send(std::size_t factor_index, const FactorInverse& inverse);
  // What travels together is here afterwards.
  void flush();
  // Another rank's, once it is here, in place of `inverse`; which stays where its owner has never made one, and where
  // none comes.
  void take(std::size_t factor_index, FactorInverse& inverse);
  // All of them, with one question whether each was ever made. After flush(). inverses: [factor].
  void takeAll(std::vector<FactorInverse>& inverses);
  // Until what was sent has left.
  void finish();

  std::size_t bytes() const { return buffer_.defined() ? buffer_.nbytes() : 0; }

 private:
  const FactorLayout& layout(std::size_t number) const { return accumulator_.layouts()[number]; }
  int workers(std::size_t number) const { return plan_.workers[static_cast<std::size_t>(layout(number).layer)]; }
  bool leavesHere(std::size_t number) const { return parcel_[number] >= 0 && plan_.factors[number].owner == rank_; }
  at::Tensor packed(std::size_t number) const;
  void pack(std::size_t number, const FactorInverse& inverse);
  FactorInverse unpacked(std::size_t number) const;

  const core::KfacPlan& plan_;
  const FactorAccumulator& accumulator_;
  InverseForm form_;
  int rank_;
  at::Tensor buffer_;                // what travels, by owner
  std::vector<std::int64_t> place_;  // [factor] in it
  std::vector<int> parcel_;          // [factor] -1: does not travel
  std::vector<bool> comes_;          // [factor] to this rank
  std::size_t parcels_ = 0;
  std::unique_ptr<Delivery> delivery_;  // null: nothing travels
};

}  // namespace torchext
