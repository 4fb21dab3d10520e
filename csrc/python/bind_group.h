// bind_group serves the bindings of every backend: what their options classes and process groups have in common.
#pragma once

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include <torch/csrc/utils/pybind.h>

#include "c10d/backend/attachable_backend.h"
#include "c10d/backend/group_options.h"
#include "c10d/backend/living_backends.h"
#include "core/transport/rack_map.h"
#include "python/bindings.h"

namespace torchext {

using NoGil = py::call_guard<py::gil_scoped_release>;

// The docstring of an options class: `about`, its arguments and those that all have, and what it raises.
class OptionsDoc {
 public:
  explicit OptionsDoc(const char* about) : text_(about) {}
  void add(const char* name, const char* meaning);
  std::string finished() const;

 private:
  std::string text_;
};

// __repr__, __eq__, __reduce__ of an options class: by the keyword arguments that make an equal object, which are its
// attributes as well.
void bindValue(const py::object& type, std::vector<std::string> keywords);

// An options class of which `listed` are all options. about: the first lines of its docstring.
template <class Options, class... Listed, std::size_t... I>
auto bindListed(py::module_& module, const char* about, const std::tuple<Listed...>& listed,
                std::index_sequence<I...> /*of listed*/) {
  OptionsDoc doc(about);
  (doc.add(std::get<I>(listed).name, std::get<I>(listed).meaning), ...);
  py::class_<Options, GroupOptions, c10::intrusive_ptr<Options>> type(module, Options::kName, doc.finished().c_str());
  const Options defaults;
  type.def(py::init([listed](typename Listed::Given... given) {
             auto options = c10::make_intrusive<Options>();
             (std::get<I>(listed).take(*options, Options::kName, std::move(given)), ...);
             options->validateGroup();
             options->validate();
             return options;
           }),
           py::kw_only(), (py::arg(std::get<I>(listed).name) = std::get<I>(listed).give(defaults))...)
      .def("__copy__", [](const Options& options) { return c10::make_intrusive<Options>(options); });
  bindValue(type, {std::get<I>(listed).name...});
  return type;
}

// An options class of a backend (option_list.h).
template <class Options>
auto bindOptions(py::module_& module, const char* about) {
  const auto listed = std::tuple_cat(Options::list(), Options::commonList());
  auto type = bindListed<Options>(module, about, listed,
                                  std::make_index_sequence<std::tuple_size_v<std::decay_t<decltype(listed)>>>());
  const auto attribute = [&](const auto& option) {
    type.def_property_readonly(option.name, [option](const Options& options) { return option.give(options); });
  };
  std::apply([&](const auto&... option) { (attribute(option), ...); }, Options::list());
  return type;
}

// A copy for a part of the group that the options were made for; members: its ranks there.
template <class Options>
c10::intrusive_ptr<Options> fitted(const Options& options, const std::vector<std::size_t>& members) {
  auto own = c10::make_intrusive<Options>(options);
  own->fit(static_cast<int>(members.size()));
  return own;
}

// The racks that a backend knows; None before a model is attached, and where they are not asked for.
template <class Group>
py::object topologyOf(const Group& group) {
  const std::optional<core::RackMap> map = group.knownRacks();
  if (!map) {
    return py::none();
  }
  py::dict result;
  result["racks"] = map->rackOfRanks();
  result["host_bandwidth"] = map->host_bandwidth;
  result["uplink_bandwidth"] = map->uplink_bandwidth;
  return result;
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
