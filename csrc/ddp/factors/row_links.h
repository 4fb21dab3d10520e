// rowLinks gives a RowExchange the messages of a backend of ours, with the waits of its group.
//
// A wait has the group's timeout. A failure of the group or abort() ends it, and the error names the rank.
#pragma once

#include "c10d/transport/point_to_point.h"
#include "c10d/transport/row_exchange.h"

namespace torchext {

// what: the operation in errors, a literal.
RowLinks rowLinks(const PointToPoint& transport, const char* what);

}  // namespace torchext
