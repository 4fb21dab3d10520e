// DearForm does what the two forms of DeAR do differently around a backward pass and a step.
//
// ShardedForm (sharded_form.h): every rank steps its slices, and the parameters are gathered. ReplicatedForm
// (replicated_form.h): the gradients are gathered, and every rank steps everything.
//
// Threads: backwardBegins(), beforeAccumulation() and backwardEnds() on autograd's, the others on the training thread.
#pragma once

#include <cstddef>

namespace torchext {

class DearForm {
 public:
  DearForm() = default;
  DearForm(const DearForm&) = delete;
  DearForm& operator=(const DearForm&) = delete;
  virtual ~DearForm() = default;

  // Of a pass that averages: its first gradient is there; all of its buckets have been posted.
  virtual void backwardBegins() = 0;
  virtual void backwardEnds() = 0;
  // Any pass is about to add to this parameter's own gradient, which may still be on its way.
  virtual void beforeAccumulation(std::size_t parameter) = 0;
  // Throws where a script has changed gradients that the step would not see changed.
  virtual void checkStep() const = 0;
  // Also under plain DDP.
  virtual void afterStep() = 0;
  // As optimizer.zero_grad().
  virtual void clearGradients() = 0;
};

}  // namespace torchext
