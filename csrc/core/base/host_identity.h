// hostIdentity() names the host that a process is on, as its kernel tells it.
#pragma once

#include <string>

namespace torchext::core {

// A host is a kernel's boot and a network namespace: processes that share both reach each other without a link. Equal
// texts on two processes: the same host.
std::string hostIdentity();

// The same for processes that can open each other's files in /proc: those that also share user and process namespace.
std::string processSpace();

}  // namespace torchext::core
