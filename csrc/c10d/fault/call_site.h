// callSite() names the line of the script that makes the present call, for ranks that compare where they are.
//
// Asked on the thread that calls a collective, which holds no lock of Python's then. The bindings know how to look; a
// thread that runs no Python (an engine's) has no line.
#pragma once

#include "core/fault/call_header.h"

namespace torchext {

core::CallLine callSite();
// Called once, by the bindings.
void setLineFinder(core::CallLine (*finder)()) noexcept;

}  // namespace torchext
