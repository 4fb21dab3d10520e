// InverseExchange brings inverses to the ranks that precondition with them.
//
// An owner packs what it has made into a buffer in which inverses lie by owner, symmetric ones as triangles. Receivers
// unpack from the same places. An update is expect(), then send() of each own inverse, finish(). Where messages overlap
// with what ranks compute (communicator.h), an inverse leaves in send(), and take() brings one before finish().
//
// Threads: the engine's lock. Errors of the group as they come.
#pragma once

#include <cstddef>
#include <cstdint>
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
  // Another rank's, once it is here, in place of `inverse`; which stays where its owner has never made one, and where
  // none comes.
  void take(std::size_t factor_index, FactorInverse& inverse);
  // Until what was sent has left. Takes those that travel together. inverses: [factor].
  void finish(std::vector<FactorInverse>& inverses);

  std::size_t bytes() const { return buffer_.defined() ? buffer_.nbytes() : 0; }

 private:
  const FactorLayout& layout(std::size_t number) const { return accumulator_.layouts()[number]; }
  int workers(std::size_t number) const { return plan_.workers[static_cast<std::size_t>(layout(number).layer)]; }
  bool leavesHere(std::size_t number) const {
    return parcel_[number] >= 0 && plan_.factors[number].owner == comm_->rank();
  }
  bool comes(std::size_t number) const {
    return parcel_[number] >= 0 && parcels_[static_cast<std::size_t>(parcel_[number])].comesTo(comm_->rank());
  }
  void waitFor(std::size_t parcel);
  void takeAll(std::vector<FactorInverse>& inverses) const;
  at::Tensor packed(std::size_t number) const;
  void pack(std::size_t number, const FactorInverse& inverse);
  FactorInverse unpacked(std::size_t number) const;

  const core::KfacPlan& plan_;
  const FactorAccumulator& accumulator_;
  InverseForm form_;
  Communicator* comm_;
  at::Tensor buffer_;                // what travels, by owner
  std::vector<std::int64_t> place_;  // [factor] in it
  std::vector<Communicator::Parcel> parcels_;
  std::vector<int> parcel_;                 // [factor] -1: does not travel
  std::vector<Communicator::Work> coming_;  // [parcel] of this update; null: not to this rank, or here
  std::vector<Communicator::Work> going_;
};

}  // namespace torchext
