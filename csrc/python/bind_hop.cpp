// Bindings of the "hop" backend: options, process group, synchronizer. No logic; every call that may block releases
// the GIL.
#include "python/bind_group.h"
#include "python/bind_synchronizer.h"

#include <optional>

#include "c10d/backend/process_group_hop.h"
#include "ddp/hop/hop_synchronizer.h"

namespace torchext {
namespace {

using HopOptions = ProcessGroupHop::Options;
using Neighbours = std::vector<std::vector<int>>;
using Weights = std::vector<std::vector<double>>;

const char* const kHopDoc = R"(Options of the "hop" backend: the graph of the workers, and what a worker waits for.

Hop: Luo et al., ASPLOS 2019, sections 3 to 5. What cannot go together raises.

Args:
    graph: "ring-based", "ring", "double-ring", "exponential" or "full".
    neighbours: Instead of ``graph``: for each rank, the ranks that it sends to.
    weights: Instead of both: ``weights[i][j]`` is the share of i's model in j's average; doubly stochastic.
    order: "parallel": models travel under compute. "serial": compute, then exchange.
    notify_ack: The older protocol, to compare with.
    max_iteration_gap: Iterations that a worker may be ahead of an out-neighbour (tokens); 0: no limit of its own.
    backup_workers: In-neighbours that are not waited for.
    staleness: Iterations that a neighbour's model may be old; newer ones count more.
    max_jump: Iterations that a worker which is far behind jumps over at once, 2 or more; 0: none.
    jump_trigger: A worker that is more iterations behind than this jumps; 1 or more.
)";

c10::intrusive_ptr<HopOptions> makeHopOptions(
    std::string graph, std::optional<Neighbours> neighbours, std::optional<Weights> weights, std::string order,
    bool notify_ack, std::int64_t max_iteration_gap, std::int64_t backup_workers, std::int64_t staleness,
    std::int64_t max_jump, std::int64_t jump_trigger, std::chrono::milliseconds heartbeat_timeout,
    const std::string& call_check, std::chrono::milliseconds operation_timeout, std::chrono::milliseconds timeout) {
  TORCH_CHECK_VALUE(!neighbours || !neighbours->empty(), "HopOptions.neighbours must have a list a rank, got []");
  TORCH_CHECK_VALUE(!weights || !weights->empty(), "HopOptions.weights must have a row a rank, got []");
  auto options = c10::make_intrusive<HopOptions>(timeout);
  options->graph = std::move(graph);
  options->neighbours = std::move(neighbours).value_or(Neighbours{});
  options->weights = std::move(weights).value_or(Weights{});
  options->order = std::move(order);
  options->notify_ack = notify_ack;
  options->max_iteration_gap = max_iteration_gap;
  options->backup_workers = backup_workers;
  options->staleness = staleness;
  options->max_jump = max_jump;
  options->jump_trigger = jump_trigger;
  return finished(std::move(options), heartbeat_timeout, call_check, operation_timeout);
}

template <class Value>
std::optional<Value> unlessEmpty(const Value& value) {
  return value.empty() ? std::nullopt : std::optional<Value>(value);
}

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
  bindOptions<HopOptions>(module, "HopOptions", kHopDoc, &makeHopOptions, py::arg("graph") = "ring-based",
                          py::arg("neighbours") = std::nullopt, py::arg("weights") = std::nullopt,
                          py::arg("order") = "parallel", py::arg("notify_ack") = false,
                          py::arg("max_iteration_gap") = 0, py::arg("backup_workers") = 0, py::arg("staleness") = 0,
                          py::arg("max_jump") = 0, py::arg("jump_trigger") = 1)
      .def_readonly("graph", &HopOptions::graph)
      .def_property_readonly("neighbours", [](const HopOptions& o) { return unlessEmpty(o.neighbours); })
      .def_property_readonly("weights", [](const HopOptions& o) { return unlessEmpty(o.weights); })
      .def_readonly("order", &HopOptions::order)
      .def_readonly("notify_ack", &HopOptions::notify_ack)
      .def_readonly("max_iteration_gap", &HopOptions::max_iteration_gap)
      .def_readonly("backup_workers", &HopOptions::backup_workers)
      .def_readonly("staleness", &HopOptions::staleness)
      .def_readonly("max_jump", &HopOptions::max_jump)
      .def_readonly("jump_trigger", &HopOptions::jump_trigger)
      .def("_fitted", &fitted<HopOptions>, py::arg("members"));

  bindBackend<ProcessGroupHop>(module, "ProcessGroupHop");

  py::class_<HopSynchronizer, AveragingSynchronizer, std::shared_ptr<HopSynchronizer>>(module, "HopSynchronizer")
      .def("begin", &HopSynchronizer::begin, NoGil())
      .def("stats", &hopToDict);

  module.def("attach_hop", &attachHop, py::arg("group"), py::arg("parameters"), py::arg("buffers"), py::arg("frozen"),
             NoGil());
}

}  // namespace torchext
