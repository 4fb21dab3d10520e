#include "python/bindings.h"

#include <chrono>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "c10d/backend/attachable_backend.h"
#include "c10d/backend/connecting_store.h"
#include "c10d/backend/living_backends.h"
#include "c10d/fault/fault_points.h"
#include "c10d/threads/interpreter_lock.h"
#include "c10d/threads/interruptible_wait.h"
#include "c10d/threads/outstanding_averages.h"
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

// checkSignals(): Python has a wait check on the main thread only, where handlers run.
unsigned long main_thread = 0;  // set once, by the binding

void checkPythonSignals() {
  if (PyThread_get_thread_ident() != main_thread || Py_IsInitialized() == 0) {
    return;
  }
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) {
    throw py::error_already_set();
  }
}

}  // namespace

void OptionsDoc::add(const char* name, const char* meaning) {
  constexpr std::size_t kWidth = 118;
  std::string line = c10::str("    ", name, ":");
  std::istringstream words(meaning);
  for (std::string word; words >> word;) {
    if (line.size() + 1 + word.size() > kWidth) {
      text_ += line + "\n";
      line = "       ";
    }
    line += " " + word;
  }
  text_ += line + "\n";
}

std::string OptionsDoc::finished() const {
  return text_ + R"(
Times are datetime.timedelta. All ranks must have the same values (of shared_memory each its own).

Raises:
    ValueError: A value out of its range, at once; one that does not fit the group's size, when the group is made.
)";
}

void bindValue(const py::object& type, std::vector<std::string> keywords) {
  const auto arguments = [keywords = std::move(keywords)](const py::object& self) {
    py::dict result;
    for (const std::string& keyword : keywords) {
      result[keyword.c_str()] = self.attr(keyword.c_str());
    }
    return result;
  };
  const auto method = [&type](const char* name, const auto& function) {
    type.attr(name) = py::cpp_function(function, py::name(name), py::is_method(type));
  };
  method("__repr__", [arguments](const py::object& self) {
    std::string text;
    for (const auto& [keyword, value] : arguments(self)) {
      text += c10::str(text.empty() ? "" : ", ", py::str(keyword).cast<std::string>(), "=",
                       py::repr(value).cast<std::string>());
    }
    return py::type::of(self).attr("__name__").cast<std::string>() + "(" + text + ")";
  });
  method("__eq__", [arguments](const py::object& self, const py::object& other) -> py::object {
    if (!py::type::of(self).is(py::type::of(other))) {
      return py::reinterpret_borrow<py::object>(Py_NotImplemented);
    }
    return py::bool_(arguments(self).equal(arguments(other)));
  });
  type.attr("__hash__") = py::none();  // compared by value, and the timeout can be set
  method("__reduce__", [arguments](const py::object& self) {
    const py::object partial = py::module_::import("functools").attr("partial");
    return py::make_tuple(partial(py::type::of(self), **arguments(self)), py::tuple());
  });
}

void bindC10d(py::module_& module) {
  setInterpreterLockReleaser(&releaseInterpreterLock);
  main_thread = py::module_::import("threading").attr("main_thread")().attr("ident").cast<unsigned long>();
  setSignalChecker(&checkPythonSignals);
  registerLineFinder();

  py::class_<ConnectingStore, c10d::PrefixStore, c10::intrusive_ptr<ConnectingStore>>(module, "ConnectingStore")
      .def(py::init([](c10::intrusive_ptr<c10d::Store> store) {
             return c10::make_intrusive<ConnectingStore>(std::move(store));
           }),
           py::arg("store"))
      .def("refuse", &ConnectingStore::refuse, py::arg("reason"), py::call_guard<py::gil_scoped_release>());

  py::class_<ClosedInChildren, std::shared_ptr<ClosedInChildren>>(module, "ClosedInChildren")
      .def(py::init<>())
      .def("watch", &ClosedInChildren::watch);

  py::class_<InnerBackends>(module, "InnerBackends")
      .def(py::init([](BackendPtr cpu, BackendPtr cuda, BackendPtr control, std::shared_ptr<ClosedInChildren> sockets) {
             return InnerBackends{std::move(cpu), std::move(cuda), std::move(control), std::move(sockets)};
           }),
           py::kw_only(), py::arg("cpu"), py::arg("cuda").none(true), py::arg("control").none(true),
           py::arg("sockets").none(true) = py::none());

  py::class_<DelegatingBackend, c10::intrusive_ptr<DelegatingBackend>, c10d::Backend>(module, "DelegatingBackend")
      .def(py::init([](int rank, int size, const std::string& name, const InnerBackends& inner, OptionsPtr options) {
             return makeBackend<DelegatingBackend>(rank, size, name, inner, std::move(options));
           }),
           py::arg("rank"), py::arg("size"), py::arg("name"), py::arg("inner"), py::arg("options"),
           py::call_guard<py::gil_scoped_release>())
      .def("abort_with_reason", &DelegatingBackend::abortWithReason, py::arg("reason"),
           py::call_guard<py::gil_scoped_release>())
      .def("_abort_because_of", &DelegatingBackend::abortBecauseOf, py::arg("rank"), py::arg("reason"),
           py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("_lost_ranks",
                             [](const DelegatingBackend& self) { return self.health()->reason().lostRanks(); })
      // Of those that a split leaves out, where the default group has a device. Ours needs nothing of them.
      .def(
          "perform_nocolor_split", [](const DelegatingBackend&, const py::object&) {}, py::arg("device"))
      .def("_set_inner_factory", &DelegatingBackend::setInnerFactory, py::arg("factory"))
      .def_property_readonly("options", &DelegatingBackend::getBackendOptions)  // torch's own is newer than 2.11
      .def_property_readonly("failure", [](const DelegatingBackend& self) {
        const auto [rank, reason] = self.health()->reason().get();
        // Text from a peer: what is no UTF-8 is replaced, not raised about.
        return py::make_tuple(rank, py::reinterpret_steal<py::str>(PyUnicode_DecodeUTF8(
                                        reason.data(), static_cast<Py_ssize_t>(reason.size()), "replace")));
      });

  py::class_<GroupOptions, c10d::Backend::Options, c10::intrusive_ptr<GroupOptions>>(module, "GroupOptions")
      .def_readonly("heartbeat_timeout", &GroupOptions::heartbeat_timeout)
      .def_readonly("call_check", &GroupOptions::call_check)
      .def_readonly("operation_timeout", &GroupOptions::operation_timeout)
      .def_readonly("timeout", &GroupOptions::timeout);

  // The systems derive from it.
  py::class_<AttachableBackend, DelegatingBackend, c10::intrusive_ptr<AttachableBackend>>(module, "AttachableBackend")
      .def(
          "_abandon_meeting",
          [](AttachableBackend& self, const std::string& error) {
            self.abandonMeeting(std::make_exception_ptr(std::runtime_error(error)));
          },
          py::arg("error"), NoGil())
      .def("_announce_member", &AttachableBackend::announceMember, py::arg("store"), py::arg("number"),
           py::call_guard<py::gil_scoped_release>())
      .def("_withdraw_announcements", &AttachableBackend::withdrawAnnouncements,
           py::call_guard<py::gil_scoped_release>());

  // Of a new group, or one that takes another's place, only some of a model's workers may be members.
  module.def(
      "drain_averages", [] { OutstandingAverages::drain(WaitingFor::kSomebody); },
      py::call_guard<py::gil_scoped_release>());
  // What tests arm, and what code in Python passes.
  module.attr("FAULT_POINTS") = py::tuple(py::cast(faultPointNames()));
  module.def("arm_fault_point", &armFaultPoint, py::arg("point"), py::arg("action"), py::arg("passes") = 0);
  module.def(
      "fault_point", [](const std::string& point) { faultPoint(point); }, py::arg("point"));
  module.def("leave_all", &DelegatingBackend::leaveAll, py::arg("reason"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace torchext
