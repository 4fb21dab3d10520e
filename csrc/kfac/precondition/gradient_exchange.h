// GradientExchange brings directions to the ranks that have not computed them, all at once.
//
// Directions of one owner lie side by side, and travel together from its workers to the ranks that they serve. Of split
// layers every rank's part travels to every other.
//
// Threads: the engine's lock. Errors of the group as they come.
#pragma once

#include <cstddef>
#include <vector>

#include "core/kfac/kfac_plan.h"
#include "kfac/comm/communicator.h"
#include "kfac/precondition/preconditioner.h"

namespace torchext {

class GradientExchange {
 public:
  // at_home: [layer] those whose directions travel in some steps only, because in others they are made in another way
  // (per_sample_preconditioner.h); they lie behind the others.
  // plan, directions and comm (null: one rank) outlive this.
  GradientExchange(const core::KfacPlan& plan, const Preconditioner& directions, const std::vector<bool>& at_home,
                   Communicator* comm);

  // When this rank's are made: until the others' are here, and the own ones have left.
  void run(bool with_those_at_home);

 private:
  Communicator* comm_;
  std::vector<Communicator::Parcel> parcels_;
  std::size_t always_ = 0;  // those that travel in all steps, which come first
};

}  // namespace torchext
