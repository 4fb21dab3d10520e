// The binding functions of torchext._C, one a file; module.cpp calls them.
#pragma once

#include <chrono>
#include <string>

#include <pybind11/chrono.h>

#include <torch/csrc/utils/pybind.h>

#include "c10d/group_options.h"

namespace torchext {

// For the options classes of all backends: the arguments and the text of what is common to them.
inline py::arg_v heartbeatArgument() {
  return py::arg_v("heartbeat_timeout", GroupOptions("defaults").heartbeat_timeout);
}
inline py::arg_v callCheckArgument() { return py::arg_v("call_check", GroupOptions("defaults").call_check); }
inline py::arg_v operationTimeoutArgument() {
  return py::arg_v("operation_timeout", GroupOptions("defaults").operation_timeout);
}
void setGroupOptions(GroupOptions& options, std::chrono::milliseconds heartbeat_timeout, std::string call_check,
                     std::chrono::milliseconds operation_timeout);
// ", heartbeat_timeout=5s, call_check='new', operation_timeout=0s, timeout=1800s)"
std::string endOf(const GroupOptions& options);

void bindC10d(py::module_& module);
void bindSynchronizer(py::module_& module);  // before the systems
void bindPrague(py::module_& module);
void bindDear(py::module_& module);
void bindDSSync(py::module_& module);
void bindHop(py::module_& module);
void bindKfac(py::module_& module);

}  // namespace torchext
