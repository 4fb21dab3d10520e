// pipeline_program is a table as a rank runs it: computations, sends, receives and waits, one after the other.
//
// A computation waits for what it reads. A send and a receive that is posted let the rank go on.
#pragma once

#include <vector>

#include "core/pipeline/pipeline_table.h"

namespace torchext::core {

// One step of a rank as a simulator runs it.
struct ProgramStep {
  PipelineAction action;
  bool waits = false;  // of a SEND: not the send itself, but the wait until it has been received
};
// [rank] its steps.
using PipelineProgram = std::vector<std::vector<ProgramStep>>;

// Each send follows its computation. There are no receives: they are posted from the start.
PipelineProgram idealProgram(const PipelineTable& table);
// What torch's runtime does with the table (lowerTable).
PipelineProgram runtimeProgram(const PipelineTable& table);
// What torch's Schedule1F1B or ScheduleGPipe does: a receive is posted just before it is needed, and sends are waited
// for. Of 1F1B the last send of the warm-up and those of the steady phase are waited for together with the next
// receive, and the others after the next computation. std::invalid_argument on a table in another order.
PipelineProgram classProgram(const PipelineTable& table);

}  // namespace torchext::core
