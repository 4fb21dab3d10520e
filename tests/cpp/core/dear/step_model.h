// What a fusion of gradients costs: the model of a training step that the tests of BayesianTuner tune on, and its exact
// optimum (the cost model of MG-WFBP, Shi et al., INFOCOM 2019). Pure; bytes and seconds; arguments are not checked.
#pragma once

#include <cstddef>
#include <vector>

#include "core/dear/bucket_plan.h"
#include "core/transport/alpha_beta.h"

namespace torchext::core::testing {

// The forward pass as a list of module calls in the order of their execution, each with the tensors that it reads. A
// tensor may be read by several calls (tied weights), a module may be called twice: both just appear again.
struct GatherSchedule {
  // All buckets, in the order in which the forward pass first needs them; those that no call reads come last.
  std::vector<int> order;
  // [call] the buckets that must be complete before it starts, each once, in ascending order of number.
  std::vector<std::vector<int>> waits_for;
};
// O(L + tensors read).
GatherSchedule gatherSchedule(const BucketPlan& plan, const std::vector<std::vector<int>>& tensors_of_call);

// One iteration, from the start of a backward pass to the end of the next forward pass, without communication.
struct StepModel {
  AlphaBeta reduce_scatter;
  AlphaBeta all_gather;
  // [tensor] when its gradient is finished, from the start of the backward pass: not descending.
  std::vector<double> ready;
  // The whole backward pass: ready.back() or more.
  double backward_seconds = 0;
  // [call] of the forward pass, in order of execution; both of the same length.
  std::vector<double> forward_seconds;
  std::vector<std::vector<int>> forward_tensors;
};

struct StepTimes {
  double reduce_scatter_end = 0;  // all from the start of the backward pass
  double all_gather_end = 0;
  double forward_end = 0;  // the iteration time
};

// When the last bucket is reduced: buckets go one after the other, each from the moment that its last gradient is
// finished. ready as in StepModel. O(L).
double reduceScatterEnd(const BucketPlan& plan, const std::vector<double>& ready, const AlphaBeta& cost);

// The iteration time of a plan. All-gathers begin when the backward pass and all reduce-scatters are over, in the order
// of gatherSchedule; a call waits for its buckets and for the call before it. O(L + tensors read).
StepTimes predictStep(const BucketPlan& plan, const StepModel& model);

// The plan with the earliest reduceScatterEnd of all 2^(L-1) plans, exactly:
//   finish(e) = min over s < e of max(ready_e, finish(s)) + alpha + beta * bytes(s+1..e)
// An earlier finish(s) never makes a later one worse, so one value a prefix is enough. Of the optimal plans it is one
// of few buckets: from the last to the first each is as large as the optimum allows. O(L^2) time, O(L) memory.
struct OptimalFusion {
  BucketPlan plan;
  double reduce_scatter_end;
};
OptimalFusion optimalFusion(const std::vector<std::size_t>& tensor_bytes, const std::vector<double>& ready,
                            const AlphaBeta& cost);

}  // namespace torchext::core::testing
