// Bindings of the "prague" backend: options, process group, synchronizer. No logic; every call that may block releases
// the GIL.
#include "python/bind_group.h"
#include "python/bind_synchronizer.h"

#include "c10d/process_group_prague.h"
#include "ddp/prague_training.h"

namespace torchext {
namespace {

using Options = ProcessGroupPrague::Options;

std::string represent(const Options& o) {
  return c10::str("PragueOptions(group_size=", o.group_size, ", generator='", o.generator, "', order='", o.order,
                  "', slowdown_threshold=", o.slowdown_threshold, ", sync_period=", o.sync_period,
                  ", sync_every=", o.sync_every, ", seed=", o.seed,
                  ", shared_memory=", o.shared_memory ? "True" : "False", endOf(o));
}

c10::intrusive_ptr<Options> makeOptions(std::int64_t group_size, std::string generator, std::string order,
                                        std::int64_t slowdown_threshold, std::int64_t sync_period,
                                        std::int64_t sync_every, std::int64_t seed, bool shared_memory,
                                        std::chrono::milliseconds heartbeat_timeout, const std::string& call_check,
                                        std::chrono::milliseconds operation_timeout,
                                        std::chrono::milliseconds timeout) {
  auto options = c10::make_intrusive<Options>(timeout);
  options->group_size = group_size;
  options->generator = std::move(generator);
  options->order = std::move(order);
  options->slowdown_threshold = slowdown_threshold;
  options->sync_period = sync_period;
  options->sync_every = sync_every;
  options->seed = seed;
  options->shared_memory = shared_memory;
  return finished(std::move(options), heartbeat_timeout, call_check, operation_timeout);
}

}  // namespace

void bindPrague(py::module_& module) {
  bindOptions<Options>(module, "PragueOptions", &makeOptions, &represent, py::arg("group_size") = 0,
                       py::arg("generator") = "smart", py::arg("order") = "cta", py::arg("slowdown_threshold") = -1,
                       py::arg("sync_period") = 1, py::arg("sync_every") = -1, py::arg("seed") = 0,
                       py::arg("shared_memory") = true)
      .def_readonly("group_size", &Options::group_size)
      .def_readonly("generator", &Options::generator)
      .def_readonly("order", &Options::order)
      .def_readonly("slowdown_threshold", &Options::slowdown_threshold)
      .def_readonly("sync_period", &Options::sync_period)
      .def_readonly("sync_every", &Options::sync_every)
      .def_readonly("seed", &Options::seed)
      .def_readonly("shared_memory", &Options::shared_memory)
      .def("_fitted", &fitted<Options>, py::arg("members"));

  bindBackend<ProcessGroupPrague>(module, "ProcessGroupPrague")
      .def("partial_all_reduce", &ProcessGroupPrague::partialAllReduce, py::arg("tensor"), py::arg("members"), NoGil())
      .def_property_readonly("shared_memory_ranks", &ProcessGroupPrague::sharedMemoryRanks);

  bindAttach(module, "attach_prague", &pragueTraining);
}

}  // namespace torchext
