// pipeline_profile holds what is known of a chain of layers and of the network between its stages.
//
//   PipelineLayer (measured) + a partition -> stage_costs -> StageTimes -> simulators, searches
// Seconds are those of one micro-batch on one rank; bytes those of one micro-batch, but for parameters.
#pragma once

#include <cstddef>
#include <map>
#include <vector>

#include "core/auto/cost_table.h"

namespace torchext::core {

struct PipelineLayer {
  double forward_seconds = 0;
  double backward_input_seconds = 0;
  double backward_weight_seconds = 0;
  std::size_t kept_bytes = 0;    // activations from forward to backward
  std::size_t output_bytes = 0;  // what the next layer reads: sent where a stage ends; its gradient is as large
  std::size_t parameter_bytes = 0;
};

struct PipelineLink {
  CostTable transfer = CostTable::line(0, 0);  // between neighbouring stages, in one direction
  std::map<int, CostTable> all_reduce;         // by data width; widths without a table, but 1, are no candidates
  bool shared_ports = false;                   // what a rank sends to both neighbours at a time goes over one port
};

// What a simulator knows of a stage.
struct StageTimes {
  double forward_seconds = 0;          // each with the overhead of an action
  double backward_input_seconds = 0;   // of I
  double backward_weight_seconds = 0;  // of W
  double backward_seconds = 0;         // of B
  double transfer_seconds = 0;         // of its output to the next stage, and of the gradient back; the last has none
  double sync_seconds = 0;             // of its gradients' all-reduce, what comes after the last B
  double split_sync_seconds = 0;       // the same after the last W
  double port_seconds = 0;             // of transfer_seconds, the time of the bytes; 0: links are independent
};

// std::invalid_argument naming the first bad value and its layer or data width; on no layer, too.
void checkLayers(const std::vector<PipelineLayer>& layers);
void checkLink(const PipelineLink& link);
void checkStages(const std::vector<StageTimes>& stages);

}  // namespace torchext::core
