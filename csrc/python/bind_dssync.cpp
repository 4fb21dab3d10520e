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
    group_size: Members that a group aims for, 2 to the world size; 0: chosen by world size.
    schedule: "grid": along one side of a grid after another; "random": shuffled anew; "topology": mostly inside racks.
    order: "cta" or "atc", as with prague.
    sync_period: Average after every n-th optimizer step, 1 or more.
    seed: Of "random"; the other schedules ignore it.
    racks: "topology": the rack of each rank, any numbers; empty: measured when the first model is attached.
    host_bandwidth: With ``racks``: of a host's link, in any unit.
    uplink_bandwidth: With ``racks``: of the slowest rack's uplink, in the same unit; both 0: equal.
    shared_memory: Averages among ranks of one host go through memory. Each rank's own choice.
)";

c10::intrusive_ptr<DSSyncOptions> makeDSSyncOptions(
    std::int64_t group_size, std::string schedule, std::string order, std::int64_t sync_period, std::int64_t seed,
    std::vector<std::int64_t> racks, double host_bandwidth, double uplink_bandwidth, bool shared_memory,
    std::chrono::milliseconds heartbeat_timeout, const std::string& call_check,
    std::chrono::milliseconds operation_timeout, std::chrono::milliseconds timeout) {
  auto options = c10::make_intrusive<DSSyncOptions>(timeout);
  options->group_size = group_size;
  options->schedule = std::move(schedule);
  options->order = std::move(order);
  options->sync_period = sync_period;
  options->seed = seed;
  options->racks = std::move(racks);
  options->host_bandwidth = host_bandwidth;
  options->uplink_bandwidth = uplink_bandwidth;
  options->shared_memory = shared_memory;
  return finished(std::move(options), heartbeat_timeout, call_check, operation_timeout);
}

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
  bindOptions<DSSyncOptions>(module, "DSSyncOptions", kDSSyncDoc, &makeDSSyncOptions, py::arg("group_size") = 0,
                             py::arg("schedule") = "grid", py::arg("order") = "cta", py::arg("sync_period") = 1,
                             py::arg("seed") = 0, py::arg("racks") = std::vector<std::int64_t>(),
                             py::arg("host_bandwidth") = 0.0, py::arg("uplink_bandwidth") = 0.0,
                             py::arg("shared_memory") = true)
      .def_readonly("group_size", &DSSyncOptions::group_size)
      .def_readonly("schedule", &DSSyncOptions::schedule)
      .def_readonly("order", &DSSyncOptions::order)
      .def_readonly("sync_period", &DSSyncOptions::sync_period)
      .def_readonly("seed", &DSSyncOptions::seed)
      .def_readonly("racks", &DSSyncOptions::racks)
      .def_readonly("host_bandwidth", &DSSyncOptions::host_bandwidth)
      .def_readonly("uplink_bandwidth", &DSSyncOptions::uplink_bandwidth)
      .def_readonly("shared_memory", &DSSyncOptions::shared_memory)
      .def("_fitted", &fittedWithRacks, py::arg("members"));

  bindBackend<ProcessGroupDSSync>(module, "ProcessGroupDSSync").def_property_readonly("topology", &topology);

  bindAttach(module, "attach_dssync", &dssyncTraining);
}

}  // namespace torchext
