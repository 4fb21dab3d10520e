// For the bindings of every backend: what their options classes and process groups have in common.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include <torch/csrc/utils/pybind.h>

#include "c10d/backend/attachable_backend.h"
#include "c10d/backend/group_options.h"
#include "c10d/backend/living_backends.h"
#include "python/bindings.h"

namespace torchext {

using NoGil = py::call_guard<py::gil_scoped_release>;

// Takes the common arguments over, and checks everything.
template <class Options>
c10::intrusive_ptr<Options> finished(c10::intrusive_ptr<Options> options, std::chrono::milliseconds heartbeat_timeout,
                                     const std::string& call_check, std::chrono::milliseconds operation_timeout) {
  options->heartbeat_timeout = heartbeat_timeout;
  options->call_check = call_check;
  options->operation_timeout = operation_timeout;
  options->validateGroup();
  options->validate();
  return options;
}

// What every options class takes besides its own: the last lines of its docstring's arguments.
extern const char* const kGroupOptionsDoc;

// __repr__, __eq__, __reduce__ of an options class: by the keyword arguments that make an equal object, which are its
// attributes as well.
void bindValue(const py::object& type, std::vector<std::string> keywords);

// An options class. doc: of the class, up to its own arguments. make: from the arguments, all of them keywords, and
// then heartbeat_timeout, call_check, operation_timeout and timeout.
template <class Options, class Make, class... Arguments>
auto bindOptions(py::module_& module, const char* name, const std::string& doc, Make make,
                 const Arguments&... arguments) {
  const GroupOptions defaults("defaults");
  py::class_<Options, GroupOptions, c10::intrusive_ptr<Options>> type(module, name, (doc + kGroupOptionsDoc).c_str());
  type.def(py::init(make), py::kw_only(), arguments..., py::arg("heartbeat_timeout") = defaults.heartbeat_timeout,
           py::arg("call_check") = defaults.call_check, py::arg("operation_timeout") = defaults.operation_timeout,
           py::arg("timeout") = std::chrono::milliseconds(kBackendDefaultTimeout))
      .def("__copy__", [](const Options& options) { return c10::make_intrusive<Options>(options); });
  bindValue(type, {arguments.name..., "heartbeat_timeout", "call_check", "operation_timeout", "timeout"});
  return type;
}

// A copy for a part of the group that the options were made for; members: its ranks there.
template <class Options>
c10::intrusive_ptr<Options> fitted(const Options& options, const std::vector<std::size_t>& members) {
  auto own = c10::make_intrusive<Options>(options);
  own->fit(static_cast<int>(members.size()));
  return own;
}

template <class Group>
auto bindBackend(py::module_& module, const char* name) {
  using Options = typename Group::Options;
  return py::class_<Group, AttachableBackend, c10::intrusive_ptr<Group>>(module, name)
      .def(py::init([](int rank, int size, const InnerBackends& inner, const c10::intrusive_ptr<Options>& options) {
             return makeBackend<Group>(rank, size, inner, options);
           }),
           py::arg("rank"), py::arg("size"), py::arg("inner"), py::arg("options"), NoGil());
}

}  // namespace torchext
