// The binding functions of torchext._C, one per layer; module.cpp calls them.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace torchext {

void bindC10d(py::module_& module);
void bindPrague(py::module_& module);

}  // namespace torchext
