// pipeline_lowering adds to a table what is sent and received, where torch's runtime adds it.
//
// lowerTable is the algorithm of torch's _add_send_recv, which is the same from 2.11 to 2.15. Ranks take turns. A rank
// takes its next action once the receive of what it reads is in its list; the send follows the action, and the receive
// goes to the end of the peer's list as it is then. So a receive stands as early as the turns allow, and the sends and
// receives of two neighbours are in one order.
//
// The result is a program: the rank runs down its list. A computation waits for its receive. A receive that is posted
// lets the rank go on; so does a send.
#pragma once

#include "core/pipeline/pipeline_table.h"

namespace torchext::core {

// std::invalid_argument naming rank and action of a table on which torch would not go on, and as of checkTable.
PipelineTable lowerTable(const PipelineTable& table);

// One step of a rank as a simulator runs it.
struct ProgramStep {
  PipelineAction action;
  bool waits = false;  // of a SEND: not the send itself, but the wait until it has been received
};
// [rank] its steps.
using PipelineProgram = std::vector<std::vector<ProgramStep>>;

// What torch's runtime does with the table.
PipelineProgram runtimeProgram(const PipelineTable& table);
// What torch's Schedule1F1B or ScheduleGPipe does: a receive is posted just before it is needed, and sends are waited
// for. Of 1F1B the last send of the warm-up and those of the steady phase are waited for together with the next
// receive, and the others after the next computation. std::invalid_argument on a table in another order.
PipelineProgram classProgram(const PipelineTable& table);

}  // namespace torchext::core
