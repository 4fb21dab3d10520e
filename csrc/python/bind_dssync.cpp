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

}  // namespace

void bindDSSync(py::module_& module) {
  bindOptions<DSSyncOptions>(module, kDSSyncDoc).def("_fitted", &fittedWithRacks, py::arg("members"));

  bindBackend<ProcessGroupDSSync>(module, "ProcessGroupDSSync")
      .def_property_readonly("topology", &topologyOf<ProcessGroupDSSync>);

  bindAttach(module, "attach_dssync", &dssyncTraining);
}

}  // namespace torchext
