// The binding functions of torchext._C, one a file; module.cpp calls them.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace torchext {

void registerLineFinder();  // callSite()
void bindC10d(py::module_& module);
void bindCalibration(py::module_& module);
void bindSynchronizer(py::module_& module);  // before the systems
void bindPrague(py::module_& module);
void bindDear(py::module_& module);
void bindDSSync(py::module_& module);
void bindHop(py::module_& module);
void bindFactors(py::module_& module);  // after the groups
void bindKfac(py::module_& module);
void bindAuto(py::module_& module);
void bindPipeline(py::module_& module);  // after auto

}  // namespace torchext
