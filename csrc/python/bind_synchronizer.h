// bind_synchronizer serves the bindings of every system that models are attached to.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include <torch/csrc/utils/pybind.h>

#include "ddp/averaging/group_synchronizer.h"

namespace torchext {

// The last owner of a synchronizer may be the reducer, destroyed under the GIL: a destructor that joins a thread must
// not hold it. In a forked child there is no thread to join.
struct DeleteWithoutGil {
  template <class T>
  void operator()(T* object) const {
    if (object->inForkedChild()) {
      return;
    }
    if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) {
      py::gil_scoped_release release;
      delete object;
    } else {
      delete object;
    }
  }
};

// Collective, without the GIL: what prague and dssync make of torchext.attach().
std::shared_ptr<AveragingSynchronizer> attachGroup(GroupTraining training, const std::vector<at::Tensor>& parameters,
                                                   const std::vector<at::Tensor>& buffers,
                                                   const std::vector<at::Tensor>& frozen, std::size_t bucket_bytes);

// attach_NAME(group, parameters, buffers, frozen, bucket_bytes), where training(group) is what the system makes of it.
template <class Group>
void bindAttach(py::module_& module, const char* name, GroupTraining (*training)(const c10::intrusive_ptr<Group>&)) {
  module.def(
      name,
      [training](const c10::intrusive_ptr<Group>& group, const std::vector<at::Tensor>& parameters,
                 const std::vector<at::Tensor>& buffers, const std::vector<at::Tensor>& frozen,
                 std::size_t bucket_bytes) {
        return attachGroup(training(group), parameters, buffers, frozen, bucket_bytes);
      },
      py::arg("group"), py::arg("parameters"), py::arg("buffers"), py::arg("frozen"), py::arg("bucket_bytes"),
      py::call_guard<py::gil_scoped_release>());
}

}  // namespace torchext
