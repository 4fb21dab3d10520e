// GradientExchange brings directions to the ranks that have not computed them.
//
// What travels is cut into instalments. Each leaves when its last direction is made; in steps that make inverses that
// is while others are still made: a layer's direction follows as soon as both of its inverses are there. A step is
// begin(), made() for each layer of all ranks' plan, finish().
//
// Threads: the engine's lock. Errors of the group as they come.
#pragma once

#include <cstddef>
#include <memory>
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

  // A step's.
  void begin(bool with_those_at_home);
  // Layers for whose directions others wait in this step, in the order in which they should be made.
  std::vector<int> awaited() const;
  // This rank's part of a layer's direction is made, or it has none: sends what that completes.
  void made(int layer);
  // When all are: until the others' are here, and the own ones have left.
  void finish();

 private:
  // Directions that leave together, when all of them are made.
  struct Instalment {
    std::vector<int> layers;
    int owner = 0;                 // kSplit: of each layer every rank makes its part
    int workers = 0;               // that make them; see KfacPlan
    std::size_t missing = 0;       // in this step so far
    std::size_t parcels_end = 0;   // of the parcels that bring it
    std::vector<std::size_t> own;  // of those, this rank's
  };
  static constexpr int kSplit = -1;

  void add(int layer, int owner, int workers, bool at_home, bool joins_all);
  at::Tensor sliceOf(const Instalment& instalment, int part) const;
  std::vector<Delivery::Parcel> parcelsOf(const Instalment& instalment, int tag) const;

  const Preconditioner& directions_;
  int ranks_;
  std::vector<Instalment> instalments_;
  std::size_t always_ = 0;              // those that travel in all steps, which come first
  bool last_at_home_ = false;           // whether the last of them does not
  std::vector<int> instalment_of_;      // [layer] -1: all ranks make all of it
  std::size_t in_play_ = 0;             // of the instalments, in this step
  std::unique_ptr<Delivery> delivery_;  // null: one rank
};

}  // namespace torchext
