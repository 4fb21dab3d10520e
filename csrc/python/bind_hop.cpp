// Bindings of the "hop" backend: options, process group, synchronizer. No logic; every call that may block releases
// the GIL.
#include "python/bind_group.h"
#include "python/bind_synchronizer.h"

#include "c10d/backend/process_group_hop.h"
#include "ddp/hop/hop_synchronizer.h"

namespace torchext {
namespace {

using HopOptions = ProcessGroupHop::Options;

const char* const kHopDoc = R"(Options of the "hop" backend: the graph of the workers, and what a worker waits for.

Hop: Luo et al., ASPLOS 2019, sections 3 to 5. What cannot go together raises.

Args:
)";

std::shared_ptr<HopSynchronizer> attachHop(const c10::intrusive_ptr<ProcessGroupHop>& group,
                                           const std::vector<at::Tensor>& parameters,
                                           const std::vector<at::Tensor>& buffers,
                                           const std::vector<at::Tensor>& frozen) {
  std::shared_ptr<HopSynchronizer> synchronizer(new HopSynchronizer(group, parameters, buffers, frozen),
                                                DeleteWithoutGil());
  group->keep(synchronizer);
  return synchronizer;
}

py::dict hopToDict(const HopSynchronizer& synchronizer) {
  const HopStats stats = synchronizer.hopStats();
  py::dict result;
  result["steps"] = stats.steps;
  result["iteration"] = synchronizer.steps();
  result["skipped"] = stats.skipped;
  result["averages"] = stats.averages;
  result["group_sizes"] = py::cast(stats.group_sizes);
  result["gaps"] = py::cast(stats.gaps);
  result["gap_bound"] = synchronizer.gapBound();
  result["ages"] = py::cast(stats.ages);
  result["tokens"] = py::cast(stats.tokens);
  result["too_late"] = stats.too_late;
  result["not_sent"] = stats.not_sent;
  result["waits"] = stats.waits;
  result["exposed_ms"] = stats.model_wait_ms + stats.token_wait_ms + stats.send_wait_ms;
  result["model_wait_ms"] = stats.model_wait_ms;
  result["token_wait_ms"] = stats.token_wait_ms;
  result["send_wait_ms"] = stats.send_wait_ms;
  result["copy_ms"] = stats.copy_ms;
  result["bytes_sent"] = stats.bytes_sent;
  result["slot_bytes"] = stats.slot_bytes;
  result["consensus_distance"] = stats.consensus_distance;
  return result;
}

}  // namespace

void bindHop(py::module_& module) {
  bindOptions<HopOptions>(module, kHopDoc).def("_fitted", &fitted<HopOptions>, py::arg("members"));

  bindBackend<ProcessGroupHop>(module, "ProcessGroupHop");

  py::class_<HopSynchronizer, AveragingSynchronizer, std::shared_ptr<HopSynchronizer>>(module, "HopSynchronizer")
      .def("begin", &HopSynchronizer::begin, NoGil())
      .def("stats", &hopToDict);

  module.def("attach_hop", &attachHop, py::arg("group"), py::arg("parameters"), py::arg("buffers"), py::arg("frozen"),
             NoGil());
}

}  // namespace torchext
