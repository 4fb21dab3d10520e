// pipeline_lowering adds to a table what is sent and received, where torch's runtime adds it.
//
// lowerTable is the algorithm of torch's _add_send_recv, which is the same from 2.11 to 2.15. Ranks take turns. A rank
// takes its next action once the receive of what it reads is in its list; the send follows the action, and the receive
// goes to the end of the peer's list as it is then. So a receive stands as early as the turns allow, and the sends and
// receives of two neighbours are in one order.
#pragma once

#include "core/pipeline/pipeline_table.h"

namespace torchext::core {

// std::invalid_argument naming rank and action of a table on which torch would not go on, and as of checkTable.
PipelineTable lowerTable(const PipelineTable& table);

}  // namespace torchext::core
