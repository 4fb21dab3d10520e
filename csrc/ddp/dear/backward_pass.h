// BackwardPass follows a backward pass that averages, from the forward pass before it to the step that uses it.
//
//   expect()       a forward pass begins: whether its backward pass is armed, that is, averages
//   queueEnd()     that pass begins: its end is queued
//   begin()        its first gradient is there
//   add()          a gradient is there; takeReady() gives the buckets that are complete by it
//   on_end         autograd has done everything else of the pass: end(), and the rest of the buckets
//   clear()        a step has used the gradients, or zero_grad() has dropped them
// Gradient accumulation: only a backward pass whose forward ran outside no_sync() is armed. Then .grad holds the sum of
// all micro-batches.
//
// Threads: autograd's in the pass, between passes the training thread.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "core/dear/ready_buckets.h"
#include "ddp/dear/shard_buckets.h"

namespace torchext {

class BackwardPass {
 public:
  struct Bucket {
    std::size_t index;
    std::vector<at::Tensor> gradients;  // of its tensors; undefined where this rank has none
  };

  // parameters, names: outlive this. on_end: called at the end of an armed pass in which gradients have come.
  BackwardPass(const std::vector<at::Tensor>& parameters, const std::vector<std::string>& names,
               std::function<void()> on_end);
  BackwardPass(const BackwardPass&) = delete;  // autograd calls it at the end of a pass
  BackwardPass& operator=(const BackwardPass&) = delete;

  // Other buckets; null: none. No pass may be under way.
  void reset(const ShardBuckets* buckets);

  void expect(bool armed);
  void disarm() { armed_ = false; }
  bool armed() const { return armed_; }
  void queueEnd();
  void begin();
  // Gradients have come since expect() or clear().
  bool begun() const { return begun_; }
  // A parameter's own, or none; c10::TypeError for one that is not dense.
  at::Tensor denseGradient(std::size_t parameter) const;
  void add(std::size_t parameter, const at::Tensor& gradient);
  std::optional<Bucket> takeReady();
  // What has no gradient and must have one: the first few names of `order`; none: nothing.
  std::string missing(const std::vector<std::int64_t>& order) const;
  // What has not come takes part with what earlier micro-batches have left, or with nothing.
  void end();
  // It has ended, and no step has used its gradients.
  bool complete() const { return complete_; }
  void clear() { begun_ = complete_ = false; }

  // In which the gradients of the last pass came.
  const std::vector<std::int64_t>& order() const { return order_; }

 private:
  const std::vector<at::Tensor>& parameters_;
  const std::vector<std::string>& names_;
  const std::function<void()> on_end_;
  core::ReadyBuckets buckets_;
  bool armed_ = false;
  bool end_queued_ = false;
  bool begun_ = false;
  bool complete_ = false;
  std::vector<at::Tensor> gradients_;  // [parameter] that have come and are not posted yet
  std::vector<std::int64_t> order_;
};

}  // namespace torchext
