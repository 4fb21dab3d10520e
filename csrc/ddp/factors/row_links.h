// rowLinks gives a RowExchange the messages of a backend of ours, with the waits of its group.
//
// A wait has the group's timeout. A failure of the group or abort() ends it, and the error names the rank.
#pragma once

#include <cstddef>
#include <optional>

#include "c10d/backend/attachable_backend.h"
#include "c10d/transport/row_exchange.h"

namespace torchext {

// None for one rank. what: the operation in errors, a literal. The group outlives what is returned.
std::optional<RowLinks> rowLinks(AttachableBackend& group, const char* what);
// The first of that many tags; the same on all ranks that ask in the same order.
int rowTags(AttachableBackend& group, std::size_t count);

}  // namespace torchext
