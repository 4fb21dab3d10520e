#include "core/pipeline/pipeline_profile.h"

#include <cmath>
#include <string>

#include "core/base/check.h"

namespace torchext::core {
namespace {

void checkSpan(const char* name, double seconds, const std::string& of) {
  if (!std::isfinite(seconds) || seconds < 0) {
    throwInvalid(name, seconds, concat("finite, 0 or more; it is of ", of));
  }
}

}  // namespace

void checkLayers(const std::vector<PipelineLayer>& layers) {
  if (layers.empty()) {
    throwInvalid("number of layers", 0, "1 or more");
  }
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const std::string of = concat("layer ", i);
    checkSpan("forward_seconds", layers[i].forward_seconds, of);
    checkSpan("backward_input_seconds", layers[i].backward_input_seconds, of);
    checkSpan("backward_weight_seconds", layers[i].backward_weight_seconds, of);
  }
}

void checkLink(const PipelineLink& link) {
  for (const auto& [width, table] : link.all_reduce) {
    if (width < 2) {
      throwInvalid("data width of an all-reduce table", width, "2 or more");
    }
  }
}

void checkStages(const std::vector<StageTimes>& stages) {
  if (stages.empty()) {
    throwInvalid("number of stages", 0, "1 or more");
  }
  for (std::size_t i = 0; i < stages.size(); ++i) {
    const std::string of = concat("stage ", i);
    checkSpan("forward_seconds", stages[i].forward_seconds, of);
    checkSpan("backward_input_seconds", stages[i].backward_input_seconds, of);
    checkSpan("backward_weight_seconds", stages[i].backward_weight_seconds, of);
    checkSpan("backward_seconds", stages[i].backward_seconds, of);
    checkSpan("transfer_seconds", stages[i].transfer_seconds, of);
    checkSpan("sync_seconds", stages[i].sync_seconds, of);
    checkSpan("split_sync_seconds", stages[i].split_sync_seconds, of);
    if (!(stages[i].port_seconds >= 0 && stages[i].port_seconds <= stages[i].transfer_seconds)) {
      throwInvalid("port_seconds", stages[i].port_seconds, concat("0 to transfer_seconds; it is of ", of));
    }
  }
}

}  // namespace torchext::core
