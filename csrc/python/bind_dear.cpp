// Bindings of the "dear" backend: options, process group, synchronizer. No logic; every call that may block releases
// the GIL.
#include "python/bind_group.h"
#include "python/bind_synchronizer.h"

#include <cmath>
#include <optional>

#include <pybind11/functional.h>

#include "c10d/backend/process_group_dear.h"
#include "ddp/dear/dear_synchronizer.h"

namespace torchext {
namespace {

using DearOptions = ProcessGroupDear::Options;

const char* const kDearDoc = R"(Options of the "dear" backend: how gradients are reduced and parameters gathered.

DeAR: Zhang et al., ICDCS 2023.

Args:
)";

std::shared_ptr<DearSynchronizer> attachDear(const c10::intrusive_ptr<ProcessGroupDear>& group,
                                             std::vector<at::Tensor> parameters, std::vector<std::string> names,
                                             bool unused_allowed, std::optional<double> bucket_mb,
                                             const DearSynchronizer::MakeDedicatedGroup& make_dedicated_group) {
  std::shared_ptr<DearSynchronizer> synchronizer(new DearSynchronizer(group, std::move(parameters), std::move(names),
                                                                      unused_allowed, bucket_mb, make_dedicated_group),
                                                 DeleteWithoutGil());
  return synchronizer;
}

py::dict dearToDict(const DearStats& stats) {
  py::dict result;
  result["steps"] = stats.steps;
  result["mode"] = stats.allreduce ? "allreduce" : "dear";
  result["decided"] = stats.decided;
  result["exposed_rs_ms"] = stats.exposed_rs_ms;
  result["exposed_ag_ms"] = stats.exposed_ag_ms;
  result["rs_ms"] = stats.rs_ms;
  result["ag_ms"] = stats.ag_ms;
  result["allreduce_step_ms"] = stats.allreduce_step_ms;
  result["bytes_sent"] = stats.bytes_sent;
  result["staging_bytes"] = stats.staging_bytes;
  result["bucket_mb"] = static_cast<double>(stats.bucket_bytes) / (1 << 20);
  result["buckets"] = py::cast(stats.buckets);
  py::list trials;
  for (const core::TunerTrial& trial : stats.trials) {
    py::dict entry;
    entry["bucket_mb"] = trial.bucket_mb;
    entry["step_ms"] = 1e3 * trial.step_seconds;
    entry["noise"] = std::sqrt(trial.noise_variance);
    trials.append(entry);
  }
  result["tuner"] = trials;
  return result;
}

}  // namespace

void bindDear(py::module_& module) {
  bindOptions<DearOptions>(module, kDearDoc);

  bindBackend<ProcessGroupDear>(module, "ProcessGroupDear");

  py::class_<DearSynchronizer, Synchronizer, std::shared_ptr<DearSynchronizer>>(module, "DearSynchronizer")
      .def("expect_backward", &DearSynchronizer::expectBackward, py::arg("exchanges"), NoGil())
      .def("backward_begins", &DearSynchronizer::backwardBegins)
      .def("on_reduced", &DearSynchronizer::onReduced, py::arg("callback"))
      .def("on_accumulating", &DearSynchronizer::onAccumulating, py::arg("callback"))
      .def_property_readonly("allreduce", &DearSynchronizer::allreduce)
      .def_property_readonly("replicated", &DearSynchronizer::replicated)
      .def("others_train_on", &DearSynchronizer::othersTrainOn, NoGil())
      .def("stepped", &DearSynchronizer::stepped, py::arg("parameter"), NoGil())
      .def("own_gradient", &DearSynchronizer::ownGradient, py::arg("parameter"), NoGil())
      .def("own_slice_of", &DearSynchronizer::ownSliceOf, py::arg("parameter"), py::arg("whole"), NoGil())
      .def("gradient", &DearSynchronizer::gradient, py::arg("parameter"), NoGil())
      .def("settle_gradient", &DearSynchronizer::settleGradient, py::arg("parameter"), NoGil())
      .def("take_moved", &DearSynchronizer::takeMoved, NoGil())
      .def_property_readonly("bucket_count", &DearSynchronizer::bucketCount)
      .def("bucket_of", &DearSynchronizer::bucketOf, py::arg("parameter"))
      .def("arrived_buckets", &DearSynchronizer::arrivedBuckets, py::arg("known"), NoGil())
      .def("clear_gradients", &DearSynchronizer::clearGradients, NoGil())
      .def("note_lost_change", &DearSynchronizer::noteLostChange)
      .def("stats", [](const DearSynchronizer& self) { return dearToDict(self.stats()); });

  module.def("attach_dear", &attachDear, py::arg("group"), py::arg("parameters"), py::arg("names"),
             py::arg("unused_allowed"), py::arg("bucket_mb") = std::nullopt,
             py::arg("make_dedicated_group") = DearSynchronizer::MakeDedicatedGroup(), NoGil());
}

}  // namespace torchext
