// iteration_simulator plays one training step: compute on one row, messages on one FIFO link on the other.
//
//   from the end of one optimizer step to the end of the next:
//     gathers    in the order of first use, one after the other; those of parameters that no span reads come last
//     forward    span by span; a span waits for the gathers of what it reads
//     backward   without a pause
//     reduces    in the given order, each from the moment that its gradients are finished and the link is free
//     unpacking  bucket by bucket, as they arrive, after the backward pass
//     optimizer  after all of it
// The link is idle whenever an optimizer step ends. So all steps are alike, and this one is the steady state.
// O(spans + messages).
#pragma once

#include <vector>

namespace torchext::core {

struct ComputeSpans {
  std::vector<double> forward_seconds;
  double backward_seconds = 0;
  double optimizer_seconds = 0;
};

// What the link carries for one bucket, or one layer's rows.
struct BucketMessage {
  double ready_seconds = 0;   // in the backward pass
  double reduce_seconds = 0;  // a reduce-scatter, or a whole all-reduce
  double unpack_seconds = 0;  // of compute, after the reduce
  double gather_seconds = 0;  // before the next forward pass
  int first_use = -1;         // the forward span that waits for the gather
  bool gathers = false;
  int item = 0;  // its name in the timeline
};

enum class Activity { kForward, kBackward, kUnpack, kOptimizer, kReduce, kGather };
const char* toString(Activity activity);

struct TimelineSpan {
  Activity activity = Activity::kForward;
  int item = 0;  // the forward span, or the message's; 0 for the others
  double begin_seconds = 0;
  double end_seconds = 0;
};

struct Iteration {
  double step_seconds = 0;
  double exposed_reduce_seconds = 0;   // of waiting, unpacking included, between backward pass and optimizer
  double exposed_gather_seconds = 0;   // of waiting in the forward pass
  std::vector<TimelineSpan> timeline;  // empty unless asked for
};

Iteration simulateIteration(const ComputeSpans& compute, const std::vector<BucketMessage>& messages,
                            bool with_timeline = false);

}  // namespace torchext::core
