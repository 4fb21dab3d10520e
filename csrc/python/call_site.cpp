// callSite(): the innermost Python frame that is neither torch's nor torchext's.
#include "c10d/fault/call_site.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include <torch/csrc/utils/pybind.h>

#include "python/bindings.h"

namespace torchext {
namespace {

// The folders of the packages that are passed over, with a slash behind. Filled once, by the binding: an import gives
// up the interpreter's lock, so two threads' first calls could wait for each other. Leaked, for a call may come while
// the process exits.
auto& passed_over = *new std::vector<std::string>;

bool isPassedOver(std::string_view file) {
  return file.starts_with("<frozen") ||  // Python's own: "<frozen runpy>"
         std::ranges::any_of(passed_over, [file](const std::string& folder) { return file.starts_with(folder); });
}

core::CallLine findLine() {
  // A thread without a state runs no Python, and must not wait for the lock while the interpreter goes.
  if (Py_IsInitialized() == 0 || PyGILState_GetThisThreadState() == nullptr) {
    return {};
  }
  const py::gil_scoped_acquire gil;
  // PyFrame_GetBack returns references of our own; the first is borrowed.
  auto frame = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
  while (frame) {
    auto* const raw = reinterpret_cast<PyFrameObject*>(frame.ptr());
    const auto code = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(raw)));
    const auto file = code.attr("co_filename").cast<std::string>();
    if (!isPassedOver(file)) {
      return core::makeCallLine(file.substr(file.rfind('/') + 1) + ":" + std::to_string(PyFrame_GetLineNumber(raw)));
    }
    frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(raw)));
  }
  return {};
}

}  // namespace

void registerLineFinder() {
  for (const char* name : {"torch", "torchext"}) {
    const auto file = py::module_::import(name).attr("__file__").cast<std::string>();
    passed_over.push_back(file.substr(0, file.rfind('/') + 1));
  }
  setLineFinder(&findLine);
}

}  // namespace torchext
