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
    group_size: Members of a group, 2 to the world size; 0: chosen by world size. Not with "static".
    generator: Who makes the groups: "smart" (inter-intra with several hosts, else division), "random", "division",
        "inter-intra", "static" or "ready-set".
    order: "cta": the average is formed under the next forward and backward pass, and the step applies the gradient to
        it. "atc": step, then average; the next forward waits for it, module by module.
    slowdown_threshold: Averages behind the others from which a worker is left out of their groups; 0: never; -1: as
        the generator needs. Not with "random" and "static".
    sync_period: Average after every n-th optimizer step, 1 or more.
    sync_every: Every n-th division is one group of all workers; 0: never; -1: as the generator needs. Not with
        "static".
    seed: Of the generator. "static" and "ready-set" draw nothing, and ignore it.
    shared_memory: Averages among ranks of one host go through memory. Each rank's own choice.
)";

c10::intrusive_ptr<PragueOptions> makePragueOptions(std::int64_t group_size, std::string generator, std::string order,
                                                    std::int64_t slowdown_threshold, std::int64_t sync_period,
                                                    std::int64_t sync_every, std::int64_t seed, bool shared_memory,
                                                    std::chrono::milliseconds heartbeat_timeout,
                                                    const std::string& call_check,
                                                    std::chrono::milliseconds operation_timeout,
                                                    std::chrono::milliseconds timeout) {
  auto options = c10::make_intrusive<PragueOptions>(timeout);
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
  bindOptions<PragueOptions>(module, "PragueOptions", kPragueDoc, &makePragueOptions, py::arg("group_size") = 0,
                             py::arg("generator") = "smart", py::arg("order") = "cta",
                             py::arg("slowdown_threshold") = -1, py::arg("sync_period") = 1, py::arg("sync_every") = -1,
                             py::arg("seed") = 0, py::arg("shared_memory") = true)
      .def_readonly("group_size", &PragueOptions::group_size)
      .def_readonly("generator", &PragueOptions::generator)
      .def_readonly("order", &PragueOptions::order)
      .def_readonly("slowdown_threshold", &PragueOptions::slowdown_threshold)
      .def_readonly("sync_period", &PragueOptions::sync_period)
      .def_readonly("sync_every", &PragueOptions::sync_every)
      .def_readonly("seed", &PragueOptions::seed)
      .def_readonly("shared_memory", &PragueOptions::shared_memory)
      .def("_fitted", &fitted<PragueOptions>, py::arg("members"));

  bindBackend<ProcessGroupPrague>(module, "ProcessGroupPrague")
      .def("partial_all_reduce", &ProcessGroupPrague::partialAllReduce, py::arg("tensor"), py::arg("members"), NoGil())
      .def_property_readonly("shared_memory_ranks", &ProcessGroupPrague::sharedMemoryRanks);

  bindAttach(module, "attach_prague", &pragueTraining);
}

}  // namespace torchext
