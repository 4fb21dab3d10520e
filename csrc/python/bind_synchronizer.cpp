// bind_synchronizer binds what every attached model has: Synchronizer, AveragingSynchronizer.
#include "python/bind_synchronizer.h"

#include "python/bindings.h"

#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include "ddp/common/local_gradient_hook.h"
#include "ddp/common/synchronizer.h"

namespace torchext {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

py::dict averagingToDict(const AveragingStats& stats) {
  py::dict result;
  result["steps"] = stats.steps;
  result["averages"] = stats.averages;
  result["group_sizes"] = py::cast(stats.group_sizes);
  result["exposed_ms"] = stats.exposed_ms;
  result["generator_wait_ms"] = stats.generator_wait_ms;
  result["peer_wait_ms"] = stats.peer_wait_ms;
  result["transfer_ms"] = stats.transfer_ms;
  result["copy_ms"] = stats.copy_ms;
  result["bytes_sent"] = stats.bytes_sent;
  result["bytes_shared"] = stats.bytes_shared;
  result["bucket_bytes"] = stats.bucket_bytes;
  result["iteration_gap"] = stats.iteration_gap;
  result["consensus_distance"] = stats.consensus_distance;
  return result;
}

}  // namespace

std::shared_ptr<AveragingSynchronizer> attachGroup(GroupTraining training, const std::vector<at::Tensor>& parameters,
                                                   const std::vector<at::Tensor>& buffers,
                                                   const std::vector<at::Tensor>& frozen, std::size_t bucket_bytes) {
  const auto group = training.group;
  std::shared_ptr<AveragingSynchronizer> synchronizer(
      new GroupSynchronizer(std::move(training), parameters, buffers, frozen, bucket_bytes), DeleteWithoutGil());
  group->keep(synchronizer);
  return synchronizer;
}

void bindSynchronizer(py::module_& module) {
  py::class_<Synchronizer, std::shared_ptr<Synchronizer>>(module, "Synchronizer")
      .def("before_step", &Synchronizer::beforeStep, NoGil())
      .def("after_step", &Synchronizer::afterStep, NoGil())
      .def("wait_tensors", &Synchronizer::waitTensors, py::arg("tensors"), NoGil())
      .def("wait_all", &Synchronizer::waitAll, NoGil())
      .def("synchronize", &Synchronizer::synchronize, NoGil())
      .def("detach", &Synchronizer::detach, NoGil())
      .def("leave", &Synchronizer::leave, py::arg("limit"), NoGil())
      .def_property("steps", &Synchronizer::steps, &Synchronizer::setSteps);

  py::class_<AveragingSynchronizer, Synchronizer, std::shared_ptr<AveragingSynchronizer>>(module,
                                                                                          "AveragingSynchronizer")
      .def("enter_average", &AveragingSynchronizer::enterAverage, NoGil())
      .def("leave_average", &AveragingSynchronizer::leaveAverage, NoGil())
      .def("resume", &AveragingSynchronizer::resume, py::arg("own"), py::arg("furthest"))
      .def("stats", [](const AveragingSynchronizer& self) { return averagingToDict(self.stats()); });

  py::class_<GradientListener, std::shared_ptr<GradientListener>>(module, "GradientListener")
      .def_readwrite("synchronizer", &GradientListener::synchronizer);
  module.def("keep_gradients_local", &keepGradientsLocal, py::arg("reducer"));
}

}  // namespace torchext
