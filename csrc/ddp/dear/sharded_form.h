// ShardedForm gives the optimizer this rank's slices of averaged gradients, and gathers the stepped parameters.
//
// Every rank steps its slice of every parameter: the optimizer's state is 1 / world size. ownGradient(i) waits for the
// bucket; what has arrived is stepped before the rest (arrivedBuckets()). The parameters' own .grad stay local.
// A script may change averaged gradients before the step. The parameters' own do not have that change
// (noteLostChange()): a later pass that adds to them raises.
//
// Threads: as DearForm; what only this class has, on the training thread.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "c10d/fault/group_health.h"
#include "ddp/dear/backward_pass.h"
#include "ddp/dear/bucket_exchanges.h"
#include "ddp/dear/dear_form.h"
#include "ddp/dear/local_gradients.h"

namespace torchext {

class ShardedForm : public DearForm {
 public:
  // All outlive this.
  ShardedForm(const ProcessGroupDear& group, const std::vector<at::Tensor>& parameters,
              const std::vector<std::string>& names, const DearPlan& plan, const BackwardPass& pass,
              LocalGradients& local, BucketExchanges& exchanges);

  // Called when a later pass is about to add to gradients that have been averaged and that no step has used.
  void onAccumulating(std::function<void()> callback) { on_accumulating_ = std::move(callback); }

  // What the optimizer steps: this rank's slice of the parameter, 1-D in memory order, sharing its memory.
  at::Tensor stepped(std::size_t parameter) const;
  // The same slice of any tensor of the parameter's shape. A view if possible.
  at::Tensor ownSliceOf(std::size_t parameter, const at::Tensor& whole) const;
  // The same slice of the averaged gradient, a view of the staging buffer, valid until afterStep(). Waits for it; none
  // when no rank has one.
  std::optional<at::Tensor> ownGradient(std::size_t parameter);
  // How many buckets have arrived, in the order of the backward pass; waits until it is more than `known`, or all.
  std::size_t arrivedBuckets(std::size_t known);
  // A script has changed averaged gradients, and a step has used them up.
  void noteLostChange() { lost_change_ = true; }

  void backwardBegins() override { accumulating_ = false; }
  void backwardEnds() override {}
  void beforeAccumulation(std::size_t parameter) override;
  void checkStep() const override {}
  void afterStep() override;
  void clearGradients() override { lost_.clear(); }

 private:
  void checkNotLost(std::size_t parameter);
  void gatherParameters();

  const std::shared_ptr<GroupHealth> health_;
  const int rank_;
  const int world_size_;
  const std::vector<at::Tensor>& parameters_;
  const std::vector<std::string>& names_;
  const DearPlan& plan_;
  const BackwardPass& pass_;
  LocalGradients& local_;
  BucketExchanges& exchanges_;
  std::function<void()> on_accumulating_;
  bool accumulating_ = false;      // a pass has added to averaged gradients
  bool lost_change_ = false;       // until afterStep()
  std::vector<const void*> lost_;  // [parameter] memory of a gradient without a change; empty: none
};

}  // namespace torchext
