// StageCosts turns runs of layers into stages: their times, their bytes and the buckets of their gradients.
//
// Sums are prefixes, so a stage costs O(1); the buckets of a run of layers are planned once (optimalBuckets over the
// last micro-batch's backward, the last layer's gradient first) and remembered. Not for several threads.
#pragma once

#include <cstddef>
#include <unordered_map>
#include <vector>

#include "core/pipeline/pipeline_profile.h"

namespace torchext::core {

struct StageRules {
  double overhead_seconds = 0;  // of each action
  double state_factor = 4;      // bytes for one byte of a parameter, with gradient and optimizer state
  // False, as torch: stage 0 computes no gradient of its input. Its I is nothing, and its W the whole backward.
  bool first_input_gradient = false;
  int data = 1;  // ranks that share a stage's gradients
};

// The all-reduce of one stage's gradients.
struct StageSync {
  // One past the last layer of each bucket, counted from the stage's last layer to its first; none with one rank.
  std::vector<int> bucket_ends;
  double exposed_seconds = 0;  // after the backward
};

class StageCosts {
 public:
  // Both outlive it. Layers and link are checked; std::invalid_argument also where the width has no table.
  StageCosts(const std::vector<PipelineLayer>& layers, const PipelineLink& link, const StageRules& rules);

  int layers() const { return static_cast<int>(layers_.size()); }
  bool sharedPorts() const { return link_.shared_ports; }
  // Layers first..last of a stage. recompute: its B runs the forward once more.
  StageTimes times(int first, int last, bool recompute) const;
  const StageSync& sync(int first, int last, bool split) const;

  double staticBytes(int first, int last) const;
  // Of a micro-batch in flight; recompute: the output alone.
  double keptBytes(int first, int last, bool recompute) const;
  // static + depth kept; recompute: and the activations of the one whose backward runs.
  double peakBytes(int first, int last, bool recompute, int depth) const;
  // The most micro-batches in flight, at most `most`; 0: not one fits.
  int depthLimit(int first, int last, bool recompute, double memory_bytes, int most) const;

 private:
  bool skipsInputGradient(int first) const;
  StageSync plannedSync(int first, int last, bool split) const;

  const std::vector<PipelineLayer>& layers_;
  const PipelineLink& link_;
  StageRules rules_;
  std::vector<double> forward_;  // [layer] sums of the layers before it, as are the others
  std::vector<double> backward_input_;
  std::vector<double> backward_weight_;
  std::vector<double> kept_;
  std::vector<double> parameters_;
  std::vector<double> transfer_;  // [layer] of its output
  std::vector<double> port_;      // [layer] of that, the time of the bytes where ports are shared
  mutable std::unordered_map<int, StageSync> syncs_;
};

}  // namespace torchext::core
