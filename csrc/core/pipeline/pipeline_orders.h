// pipeline_orders writes tables: warm-up depths, GPipe, and torch's one-stage zero bubble.
//
// A table of depths: stage j runs d_j forwards, then B, F, B, F, ..., then Bs. Depths lie in 1..M, and never rise from
// a stage to the next: a stage that waits for more forwards than the one before it gives waits for ever. 1F1B is d_j =
// min(M, p - j), and GPipe d_j = M.
#pragma once

#include <vector>

#include "core/pipeline/pipeline_table.h"

namespace torchext::core {

// std::invalid_argument naming the first bad depth and its stage, on M below 1 and on no depth.
void checkDepths(const std::vector<int>& depths, int microbatches);

PipelineTable depthTable(const std::vector<int>& depths, int microbatches);
// Those of torch's Schedule1F1B: min(M, p - j).
std::vector<int> classDepths(int stages, int microbatches);
PipelineTable gpipeTable(int stages, int microbatches);
// The order of torch's ScheduleInterleavedZeroBubble with one stage a rank (ZB-H1, Qi et al., ICLR 2024): at most
// min(M, p) in flight. Torch's class takes M that are multiples of max(1, M / p) only; the table any.
PipelineTable zeroBubbleClassTable(int stages, int microbatches);

}  // namespace torchext::core
