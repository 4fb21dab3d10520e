// pipeline_simulator plays one training step of a table on given stages. Exact, given its inputs.
//
// Ranks run their rows in order. F(j,m) needs F(j-1,m)'s output, B or I(j,m) the gradient of B or I(j+1,m), W(j,m) its
// I(j,m). Between two ranks one transfer at a time moves in each direction, in the order of the sends.
//   "ideal"  a transfer begins once it has been sent, as if it had the network alone
//   "torch"  and once its receive has been posted, where torch's runtime posts it: Gloo moves nothing before. Transfers
//            of a rank share its port where stages have port_seconds (transfer_network)
//   "class"  the same, as torch's Schedule1F1B and ScheduleGPipe post and wait (classProgram)
// The step ends with the last action of a stage and its sync.
#pragma once

#include <string>
#include <vector>

#include "core/pipeline/pipeline_profile.h"
#include "core/pipeline/pipeline_table.h"

namespace torchext::core {

enum class PipelineMode { kIdeal, kTorch, kClass };
// "ideal", "torch", "class".
const char* toString(PipelineMode mode);
PipelineMode parsePipelineMode(const std::string& name);

struct PipelineSpan {
  int rank = 0;
  PipelineAction action;  // a computation; SEND_F or SEND_B: a transfer from that rank
  double begin_seconds = 0;
  double end_seconds = 0;
};

struct PipelineRun {
  double seconds = 0;
  double bubble = 0;                    // share of the ranks' time without computation, 0..1
  std::vector<double> end_seconds;      // [stage] of its last action
  std::vector<int> most_in_flight;      // [stage]
  std::vector<PipelineSpan> spans;      // [] unless asked for; by rank, and then by time
  std::vector<PipelineSpan> transfers;  // the same
};

// std::invalid_argument: a bad table or time, as many rows as stages are not there, and a deadlock, by rank and action.
PipelineRun simulateTable(const std::vector<StageTimes>& stages, const PipelineTable& table, PipelineMode mode,
                          bool with_timeline = false);

}  // namespace torchext::core
