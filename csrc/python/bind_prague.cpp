// Bindings of the "prague" backend: options, process group, synchronizer. No logic; every call that may block releases
// the GIL.
#include "python/bind_c10d.h"

#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include "c10d/process_group_prague.h"
#include "ddp/local_gradient_hook.h"
#include "ddp/prague_synchronizer.h"

namespace torchext {
namespace {

using Options = ProcessGroupPrague::Options;
using NoGil = py::call_guard<py::gil_scoped_release>;

std::string describe(const Options& o) {
  return c10::str("PragueOptions(group_size=", o.group_size, ", generator='", o.generator, "', order='", o.order,
                  "', slowdown_threshold=", o.slowdown_threshold, ", sync_period=", o.sync_period,
                  ", sync_every=", o.sync_every, ", seed=", o.seed,
                  ", timeout=", std::chrono::duration<double>(o.timeout).count(), "s)");
}

c10::intrusive_ptr<Options> makeOptions(std::int64_t group_size, std::string generator, std::string order,
                                        std::int64_t slowdown_threshold, std::int64_t sync_period,
                                        std::int64_t sync_every, std::int64_t seed, std::chrono::milliseconds timeout) {
  auto options = c10::make_intrusive<Options>(timeout);
  options->group_size = group_size;
  options->generator = std::move(generator);
  options->order = std::move(order);
  options->slowdown_threshold = slowdown_threshold;
  options->sync_period = sync_period;
  options->sync_every = sync_every;
  options->seed = seed;
  options->validate();
  return options;
}

// The last owner may be the reducer, destroyed under the GIL: a destructor that joins a thread must not hold it.
void deleteWithoutGil(PragueSynchronizer* synchronizer) {
  if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) {
    py::gil_scoped_release release;
    delete synchronizer;
  } else {
    delete synchronizer;
  }
}

std::shared_ptr<Synchronizer> attachPrague(const c10::intrusive_ptr<ProcessGroupPrague>& group, c10d::Reducer& reducer,
                                           const std::vector<at::Tensor>& parameters,
                                           const std::vector<at::Tensor>& buffers, std::size_t bucket_bytes) {
  std::shared_ptr<PragueSynchronizer> synchronizer(new PragueSynchronizer(group, parameters, buffers, bucket_bytes),
                                                   deleteWithoutGil);
  reducer.register_comm_hook(std::make_unique<LocalGradientHook>(synchronizer));
  return synchronizer;
}

py::dict toDict(const SynchronizerStats& stats) {
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
  result["bucket_bytes"] = stats.bucket_bytes;
  result["iteration_gap"] = stats.iteration_gap;
  result["consensus_distance"] = stats.consensus_distance;
  return result;
}

}  // namespace

void bindPrague(py::module_& module) {
  py::class_<Options, c10d::Backend::Options, c10::intrusive_ptr<Options>>(module, "PragueOptions")
      .def(py::init(&makeOptions), py::kw_only(), py::arg("group_size") = 0, py::arg("generator") = "smart",
           py::arg("order") = "atc", py::arg("slowdown_threshold") = -1, py::arg("sync_period") = 1,
           py::arg("sync_every") = -1, py::arg("seed") = 0,
           py::arg("timeout") = std::chrono::milliseconds(kBackendDefaultTimeout))
      .def_readonly("group_size", &Options::group_size)
      .def_readonly("generator", &Options::generator)
      .def_readonly("order", &Options::order)
      .def_readonly("slowdown_threshold", &Options::slowdown_threshold)
      .def_readonly("sync_period", &Options::sync_period)
      .def_readonly("sync_every", &Options::sync_every)
      .def_readonly("seed", &Options::seed)
      .def("__copy__", [](const Options& options) { return c10::make_intrusive<Options>(options); })
      .def("__repr__", &describe);

  py::class_<ProcessGroupPrague, DelegatingBackend, c10::intrusive_ptr<ProcessGroupPrague>>(module,
                                                                                            "ProcessGroupPrague")
      .def(py::init([](int rank, int size, const InnerBackends& inner, const c10::intrusive_ptr<Options>& options) {
             return c10::make_intrusive<ProcessGroupPrague>(rank, size, inner, options);
           }),
           py::arg("rank"), py::arg("size"), py::arg("inner"), py::arg("options"), NoGil())
      .def("partial_all_reduce", &ProcessGroupPrague::partialAllReduce, py::arg("tensor"), py::arg("members"), NoGil());

  py::class_<Synchronizer, std::shared_ptr<Synchronizer>>(module, "Synchronizer")
      .def("before_step", &Synchronizer::beforeStep, NoGil())
      .def("after_step", &Synchronizer::afterStep, NoGil())
      .def("wait_bucket", &Synchronizer::waitBucket, py::arg("bucket"), NoGil())
      .def("wait_all", &Synchronizer::waitAll, NoGil())
      .def("synchronize", &Synchronizer::synchronize, NoGil())
      .def("enter_average", &Synchronizer::enterAverage, NoGil())
      .def("leave_average", &Synchronizer::leaveAverage, NoGil())
      .def("detach", &Synchronizer::detach, NoGil())
      .def("leave", &Synchronizer::leave, py::arg("limit"), NoGil())
      .def("stats", [](const Synchronizer& self) { return toDict(self.stats()); })
      .def_property("steps", &Synchronizer::steps, &Synchronizer::setSteps)
      .def_property_readonly("bucket_of", &Synchronizer::bucketOf);

  module.def("attach_prague", &attachPrague, py::arg("group"), py::arg("reducer"), py::arg("parameters"),
             py::arg("buffers"), py::arg("bucket_bytes"), NoGil());
}

}  // namespace torchext
