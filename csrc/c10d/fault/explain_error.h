// explain() turns what went wrong in an operation into the error to show, and ends the group where it must.
//
// Threads: any.
#pragma once

#include <exception>
#include <string>

#include "c10d/fault/op_info.h"

namespace torchext {

class GroupHealth;

// What every error of a failed group ends with.
inline constexpr const char* kWayOut =
    "; this group cannot be used any more: destroy_process_group() and initialize again, or let torchrun "
    "--max-restarts restart the job";

// A DistBackendError of this text.
std::exception_ptr distError(std::string text);

// Of an inner backend's error: one of connections names the rank that died (waiting up to a second for the fault
// message) and poisons the group; others keep their text.
std::exception_ptr explain(GroupHealth& health, const std::exception_ptr& error, const OpInfo& op);
// The same of what the other ranks wait for, whoever calls it: with an error that is local (local_error.h) this rank
// leaves the group, and the others know why.
std::exception_ptr explainToAll(GroupHealth& health, const std::exception_ptr& error, const OpInfo& op);
// op.peer sent what no torchext of this version sends: poisons the group and returns the call's error.
std::exception_ptr refuse(GroupHealth& health, const OpInfo& op, const std::string& error);
// An operation has passed its limit: poisons the group, naming who has not called it where the ring knows.
void reportTimeout(GroupHealth& health, const OpInfo& op, const std::string& detail);

}  // namespace torchext
