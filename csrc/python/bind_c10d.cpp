#include "python/bindings.h"

#include <chrono>

#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "c10d/attachable_backend.h"
#include "c10d/interpreter_lock.h"
#include "c10d/promises.h"
#include "python/bind_group.h"

namespace torchext {
namespace {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using OptionsPtr = c10::intrusive_ptr<c10d::Backend::Options>;

void releaseInterpreterLock(const std::function<void()>& body) {
  if (Py_IsInitialized() && PyGILState_Check()) {
    py::gil_scoped_release release;
    body();
  } else {
    body();
  }
}

}  // namespace

std::string endOf(const GroupOptions& options) {
  const auto seconds = [](std::chrono::milliseconds time) { return std::chrono::duration<double>(time).count(); };
  return c10::str(", heartbeat_timeout=", seconds(options.heartbeat_timeout), "s, call_check='", options.call_check,
                  "', operation_timeout=", seconds(options.operation_timeout), "s, timeout=", seconds(options.timeout),
                  "s)");
}

void bindC10d(py::module_& module) {
  setInterpreterLockReleaser(&releaseInterpreterLock);

  py::class_<InnerBackends>(module, "InnerBackends")
      .def(py::init([](BackendPtr cpu, BackendPtr cuda, BackendPtr control) {
             return InnerBackends{std::move(cpu), std::move(cuda), std::move(control)};
           }),
           py::kw_only(), py::arg("cpu"), py::arg("cuda").none(true), py::arg("control").none(true));

  py::class_<DelegatingBackend, c10::intrusive_ptr<DelegatingBackend>, c10d::Backend>(module, "DelegatingBackend")
      .def(py::init([](int rank, int size, const std::string& name, const InnerBackends& inner, OptionsPtr options) {
             return c10::make_intrusive<DelegatingBackend>(rank, size, name, inner, std::move(options));
           }),
           py::arg("rank"), py::arg("size"), py::arg("name"), py::arg("inner"), py::arg("options"),
           py::call_guard<py::gil_scoped_release>())
      .def("abort_with_reason", &DelegatingBackend::abortWithReason, py::arg("reason"),
           py::call_guard<py::gil_scoped_release>())
      .def("_set_inner_factory", &DelegatingBackend::setInnerFactory, py::arg("factory"))
      .def("_announce_survival", &DelegatingBackend::announceSurvival, py::arg("store"), py::arg("key"),
           py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("options", &DelegatingBackend::getBackendOptions)  // torch's own is newer than 2.11
      .def_property_readonly("failure", [](const DelegatingBackend& self) {
        const auto [rank, reason] = self.health()->firstReason();
        // Text from a peer: what is no UTF-8 is replaced, not raised about.
        return py::make_tuple(rank, py::reinterpret_steal<py::str>(PyUnicode_DecodeUTF8(
                                        reason.data(), static_cast<Py_ssize_t>(reason.size()), "replace")));
      });

  py::class_<GroupOptions, c10d::Backend::Options, c10::intrusive_ptr<GroupOptions>>(module, "GroupOptions")
      .def_readonly("heartbeat_timeout", &GroupOptions::heartbeat_timeout)
      .def_readonly("call_check", &GroupOptions::call_check)
      .def_readonly("operation_timeout", &GroupOptions::operation_timeout);

  // Nothing of its own to call; the systems derive from it.
  const py::class_<AttachableBackend, DelegatingBackend, c10::intrusive_ptr<AttachableBackend>> attachable(
      module, "AttachableBackend");

  module.def("keep_promises", &Promises::keepAll, py::call_guard<py::gil_scoped_release>());
  module.def("leave_all", &DelegatingBackend::leaveAll, py::arg("reason"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace torchext
