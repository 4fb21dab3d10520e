// Bindings of the "prague" backend: options, process group, synchronizer. No logic; every call that may block releases
// the GIL.
#include "python/bind_group.h"
#include "python/bind_synchronizer.h"

#include "c10d/backend/process_group_prague.h"
#include "ddp/averaging/prague_training.h"

namespace torchext {
namespace {

using PragueOptions = ProcessGroupPrague::Options;

const char* const kPragueDoc = R"(Options of the "prague" backend: who averages with whom, and when.

Prague: Luo et al., ASPLOS 2020, sections 3 to 5.

Args:
)";

}  // namespace

void bindPrague(py::module_& module) {
  bindOptions<PragueOptions>(module, kPragueDoc).def("_fitted", &fitted<PragueOptions>, py::arg("members"));

  bindBackend<ProcessGroupPrague>(module, "ProcessGroupPrague")
      .def("partial_all_reduce", &ProcessGroupPrague::partialAllReduce, py::arg("tensor"), py::arg("members"), NoGil())
      .def_property_readonly("topology", &topologyOf<ProcessGroupPrague>)
      .def_property_readonly("shared_memory_ranks", &ProcessGroupPrague::sharedMemoryRanks);

  bindAttach(module, "attach_prague", &pragueTraining);
}

}  // namespace torchext
