// pipeline_alternatives lists what a plan was chosen from, with the reason why each lost.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/pipeline/pipeline_candidates.h"

namespace torchext::core {

struct PipelineAlternative {
  std::string name;    // "4 stages x 2, zero-bubble", "4 stages x 2, even 1f1b", "8 stages"
  double seconds = 0;  // infinity: does not fit
  std::string reason;  // "2.1 % slower", "needs 3221225472 bytes on stage 0", "the plan"
};

// Fastest first: each search's best, torch's own way (an even split in the order of Schedule1F1B) for each number of
// stages, and the numbers of stages that cannot be. bests: of each search, where it has one.
std::vector<PipelineAlternative> pipelineAlternatives(PipelineCandidates& candidates, const FoundOrder& chosen,
                                                      double memory_bytes,
                                                      const std::vector<std::optional<StageOrder>>& bests);

}  // namespace torchext::core
