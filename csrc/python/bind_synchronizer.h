// For the bindings of every system that models are attached to.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace torchext {

// The last owner of a synchronizer may be the reducer, destroyed under the GIL: a destructor that joins a thread must
// not hold it.
struct DeleteWithoutGil {
  template <class T>
  void operator()(T* object) const {
    if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) {
      py::gil_scoped_release release;
      delete object;
    } else {
      delete object;
    }
  }
};

}  // namespace torchext
