// Bindings of the "dssync" backend: options, process group, synchronizer. No logic; every call that may block releases
// the GIL.
#include "python/bind_group.h"
#include "python/bind_synchronizer.h"

#include "c10d/backend/process_group_dssync.h"
#include "ddp/averaging/dssync_training.h"

namespace torchext {
namespace {

using DSSyncOptions = ProcessGroupDSSync::Options;

const char* const kDSSyncDoc = R"(Options of the "dssync" backend: how workers are divided into groups, step by step.

DS-Sync: Wang et al., INFOCOM 2022.

Args:
)";

c10::intrusive_ptr<DSSyncOptions> fittedWithRacks(const DSSyncOptions& options,
                                                  const std::vector<std::size_t>& members) {
  auto own = fitted(options, members);
  if (!options.racks.empty()) {
    own->racks.clear();
    for (const auto member : members) {
      own->racks.push_back(options.racks.at(member));
    }
  }
  return own;
}

// None before a model is attached, and with schedules that do not ask.
py::object topology(const ProcessGroupDSSync& group) {
  const auto map = group.knownRacks();
  if (!map) {
    return py::none();
  }
  std::vector<int> racks;
  for (const int host : map->host_of) {
    racks.push_back(map->rack_of[static_cast<std::size_t>(host)]);
  }
  py::dict result;
  result["racks"] = racks;
  result["host_bandwidth"] = map->host_bandwidth;
  result["uplink_bandwidth"] = map->uplink_bandwidth;
  return result;
}

}  // namespace

void bindDSSync(py::module_& module) {
  bindOptions<DSSyncOptions>(module, kDSSyncDoc).def("_fitted", &fittedWithRacks, py::arg("members"));

  bindBackend<ProcessGroupDSSync>(module, "ProcessGroupDSSync").def_property_readonly("topology", &topology);

  bindAttach(module, "attach_dssync", &dssyncTraining);
}

}  // namespace torchext
