// StepProfile is what profiling knows of a model: when its gradients are finished, and when its parameters are needed.
//
// Gradients are positions 0..L-1 in the order in which the backward pass finishes them. Buckets hold gradients of one
// kind. Seconds and bytes.
#pragma once

#include <cstddef>
#include <vector>

#include "core/auto/collective_cost.h"

namespace torchext::core {

struct Gradient {
  std::size_t bytes = 0;
  double ready_seconds = 0;  // from the start of the backward pass; one below an earlier one counts as that
  int first_use = -1;        // the forward span that reads the parameter first; -1: none
  int kind = 0;              // element type and device, dense numbers from 0
  int layer = -1;            // of StepProfile::layers whose rows also give this gradient; -1: none
};

struct StepProfile {
  std::vector<double> forward_seconds;  // spans of the forward pass, in order of execution
  double backward_seconds = 0;          // the whole pass: the last ready_seconds or more
  double optimizer_seconds = 0;         // of all parameters, on one rank
  std::vector<Gradient> gradients;
  std::vector<LayerRows> layers;                  // that may be exchanged as rows
  std::vector<std::vector<double>> step_samples;  // [rank] forward and backward together; empty: no noise

  double computeSeconds() const;  // forward and backward
  std::size_t gradientBytes() const;
};

// std::invalid_argument naming the first bad value, on no gradient at all, too.
void checkProfile(const StepProfile& profile);

// With forward spans, backward pass and ready times multiplied.
StepProfile stretched(StepProfile profile, double factor);

}  // namespace torchext::core
