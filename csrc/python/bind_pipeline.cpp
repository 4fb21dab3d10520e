// Bindings of csrc/core/pipeline: plain values in, plain values out. No logic; searches and simulations release the
// GIL.
#include "python/bindings.h"

#include <tuple>
#include <utility>

#include <pybind11/stl.h>

#include "core/base/check.h"
#include "core/pipeline/pipeline_lowering.h"
#include "core/pipeline/pipeline_orders.h"
#include "core/pipeline/pipeline_plan.h"
#include "core/pipeline/pipeline_simulator.h"
#include "core/pipeline/zero_bubble_scheduler.h"

namespace torchext {
namespace {

// [rank] (kind, stage, micro-batch).
using TableRows = std::vector<std::vector<std::tuple<std::string, int, int>>>;
using AllReduceTables = std::map<int, core::CostTable>;

core::PipelineTable tableOfRows(const TableRows& rows) {
  core::PipelineTable table;
  table.reserve(rows.size());
  for (const auto& row : rows) {
    auto& actions = table.emplace_back();
    for (const auto& [kind, stage, microbatch] : row) {
      actions.push_back({core::parseActionKind(kind), stage, microbatch});
    }
  }
  return table;
}

TableRows rowsOfTable(const core::PipelineTable& table) {
  TableRows rows;
  rows.reserve(table.size());
  for (const auto& actions : table) {
    auto& row = rows.emplace_back();
    for (const core::PipelineAction& action : actions) {
      row.emplace_back(core::toString(action.kind), action.stage, action.microbatch);
    }
  }
  return rows;
}

core::PipelineLink straightLink(double latency_seconds, double bytes_per_second, AllReduceTables all_reduce,
                                bool shared_ports) {
  if (!(bytes_per_second > 0)) {
    core::throwInvalid("bytes_per_second", bytes_per_second, "above 0");
  }
  return {core::CostTable::line(latency_seconds, 1 / bytes_per_second), std::move(all_reduce), shared_ports};
}

core::PipelineOptions makeOptions(int world_size, int microbatches, std::optional<double> memory_bytes,
                                  const std::vector<std::string>& schedules, std::optional<int> stages,
                                  double state_factor, bool recompute, double overhead_seconds,
                                  bool first_input_gradient, bool split_data_parallel, std::vector<int> most_in_flight,
                                  int frontier_points, double most_partitions) {
  core::PipelineOptions options;
  options.world_size = world_size;
  options.microbatches = microbatches;
  options.memory_bytes = memory_bytes;
  options.schedules.clear();
  for (const std::string& schedule : schedules) {
    options.schedules.push_back(core::parseOrderFamily(schedule));
  }
  options.stages = stages;
  options.state_factor = state_factor;
  options.recompute = recompute;
  options.overhead_seconds = overhead_seconds;
  options.first_input_gradient = first_input_gradient;
  options.split_data_parallel = split_data_parallel;
  options.most_in_flight = std::move(most_in_flight);
  options.frontier_points = frontier_points;
  options.most_partitions = most_partitions;
  core::checkOptions(options);
  return options;
}

core::StageTimes makeStage(double forward_seconds, double backward_input_seconds, double backward_weight_seconds,
                           std::optional<double> backward_seconds, double transfer_seconds, double sync_seconds,
                           double split_sync_seconds, double port_seconds) {
  const double backward = backward_seconds.value_or(backward_input_seconds + backward_weight_seconds);
  return {forward_seconds,  backward_input_seconds, backward_weight_seconds, backward,
          transfer_seconds, sync_seconds,           split_sync_seconds,      port_seconds};
}

core::PipelineTable zeroBubbleTable(const std::vector<core::StageTimes>& stages, const std::vector<int>& limits,
                                    int microbatches) {
  core::checkStages(stages);
  if (microbatches < 1) {
    core::throwInvalid("microbatches", microbatches, "1 or more");
  }
  if (limits.size() != stages.size()) {
    core::throwInvalid("number of limits", limits.size(), core::concat(stages.size(), ", the number of stages"));
  }
  for (const int limit : limits) {
    if (limit < 1) {
      core::throwInvalid("limit", limit, "1 or more");
    }
  }
  core::ZeroBubbleScheduler scheduler(microbatches);
  scheduler.schedule(stages, limits);
  return scheduler.table();
}

// What calls without the GIL, between rows and rows.
template <class Call>
auto withoutGil(Call call) {
  const py::gil_scoped_release release;
  return call();
}

void bindPipelineInput(py::module_& module) {
  py::class_<core::PipelineLayer>(module, "PipelineLayer")
      .def(py::init<double, double, double, std::size_t, std::size_t, std::size_t>(), py::kw_only(),
           py::arg("forward_seconds"), py::arg("backward_input_seconds"), py::arg("backward_weight_seconds"),
           py::arg("kept_nbytes") = 0, py::arg("output_nbytes") = 0, py::arg("parameter_nbytes") = 0)
      .def_readonly("forward_seconds", &core::PipelineLayer::forward_seconds)
      .def_readonly("backward_input_seconds", &core::PipelineLayer::backward_input_seconds)
      .def_readonly("backward_weight_seconds", &core::PipelineLayer::backward_weight_seconds)
      .def_readonly("kept_nbytes", &core::PipelineLayer::kept_bytes)
      .def_readonly("output_nbytes", &core::PipelineLayer::output_bytes)
      .def_readonly("parameter_nbytes", &core::PipelineLayer::parameter_bytes);

  py::class_<core::PipelineLink>(module, "PipelineLink")
      .def(py::init<core::CostTable, AllReduceTables, bool>(), py::kw_only(), py::arg("transfer"),
           py::arg("all_reduce") = AllReduceTables(), py::arg("shared_ports") = false)
      .def_static("straight", &straightLink, py::kw_only(), py::arg("latency_seconds"), py::arg("bytes_per_second"),
                  py::arg("all_reduce") = AllReduceTables(), py::arg("shared_ports") = false)
      .def_readonly("transfer", &core::PipelineLink::transfer)
      .def_readonly("all_reduce", &core::PipelineLink::all_reduce)
      .def_readonly("shared_ports", &core::PipelineLink::shared_ports);

  const core::PipelineOptions defaults;
  py::class_<core::PipelineOptions>(module, "PipelineOptions")
      .def(py::init(&makeOptions), py::kw_only(), py::arg("world_size"), py::arg("microbatches"),
           py::arg("memory_nbytes") = std::nullopt, py::arg("schedules") = std::vector<std::string>{"1f1b"},
           py::arg("stages") = std::nullopt, py::arg("state_factor") = defaults.state_factor,
           py::arg("recompute") = false, py::arg("overhead_seconds") = 0.0, py::arg("first_input_gradient") = false,
           py::arg("split_data_parallel") = false, py::arg("most_in_flight") = std::vector<int>(),
           py::arg("frontier_points") = defaults.frontier_points,
           py::arg("most_partitions") = defaults.most_partitions);

  py::class_<core::StageTimes>(module, "StageTimes")
      .def(py::init(&makeStage), py::kw_only(), py::arg("forward_seconds"), py::arg("backward_input_seconds"),
           py::arg("backward_weight_seconds"), py::arg("backward_seconds") = std::nullopt,
           py::arg("transfer_seconds") = 0.0, py::arg("sync_seconds") = 0.0, py::arg("split_sync_seconds") = 0.0,
           py::arg("port_seconds") = 0.0)
      .def_readonly("forward_seconds", &core::StageTimes::forward_seconds)
      .def_readonly("backward_input_seconds", &core::StageTimes::backward_input_seconds)
      .def_readonly("backward_weight_seconds", &core::StageTimes::backward_weight_seconds)
      .def_readonly("backward_seconds", &core::StageTimes::backward_seconds)
      .def_readonly("transfer_seconds", &core::StageTimes::transfer_seconds)
      .def_readonly("sync_seconds", &core::StageTimes::sync_seconds)
      .def_readonly("split_sync_seconds", &core::StageTimes::split_sync_seconds)
      .def_readonly("port_seconds", &core::StageTimes::port_seconds);
}

void bindPipelinePlan(py::module_& module) {
  py::class_<core::PlannedStage>(module, "PlannedStage")
      .def_readonly("first", &core::PlannedStage::first)
      .def_readonly("last", &core::PlannedStage::last)
      .def_readonly("data", &core::PlannedStage::data)
      .def_readonly("depth", &core::PlannedStage::depth)
      .def_readonly("recompute", &core::PlannedStage::recompute)
      .def_readonly("bucket_ends", &core::PlannedStage::bucket_ends)
      .def_readonly("sync_seconds", &core::PlannedStage::sync_seconds)
      .def_readonly("peak_nbytes", &core::PlannedStage::peak_bytes);

  py::class_<core::PipelineAlternative>(module, "PipelineAlternative")
      .def_readonly("name", &core::PipelineAlternative::name)
      .def_readonly("seconds", &core::PipelineAlternative::seconds)
      .def_readonly("reason", &core::PipelineAlternative::reason);

  py::class_<core::FrontierPoint>(module, "PipelinePoint")
      .def_readonly("memory_nbytes", &core::FrontierPoint::memory_bytes)
      .def_readonly("seconds", &core::FrontierPoint::seconds)
      .def_readonly("sizes", &core::FrontierPoint::sizes)
      .def_readonly("depths", &core::FrontierPoint::depths)
      .def_property_readonly("order", [](const core::FrontierPoint& self) { return core::toString(self.order); })
      .def_readonly("data", &core::FrontierPoint::data)
      .def_readonly("recompute", &core::FrontierPoint::recompute);

  py::class_<core::PlannedPipeline>(module, "PlannedPipeline")
      .def_readonly("stages", &core::PlannedPipeline::stages)
      .def_readonly("microbatches", &core::PlannedPipeline::microbatches)
      .def_property_readonly("order", [](const core::PlannedPipeline& self) { return core::toString(self.order); })
      .def_property_readonly("table", [](const core::PlannedPipeline& self) { return rowsOfTable(self.table); })
      .def_readonly("seconds", &core::PlannedPipeline::seconds)
      .def_readonly("bubble", &core::PlannedPipeline::bubble)
      .def_readonly("exhaustive", &core::PlannedPipeline::exhaustive)
      .def_readonly("alternatives", &core::PlannedPipeline::alternatives)
      .def_readonly("frontier", &core::PlannedPipeline::frontier);
}

void bindPipelineRun(py::module_& module) {
  py::class_<core::PipelineSpan>(module, "PipelineSpan")
      .def_readonly("rank", &core::PipelineSpan::rank)
      .def_property_readonly("kind", [](const core::PipelineSpan& self) { return core::toString(self.action.kind); })
      .def_property_readonly("stage", [](const core::PipelineSpan& self) { return self.action.stage; })
      .def_property_readonly("microbatch", [](const core::PipelineSpan& self) { return self.action.microbatch; })
      .def_readonly("begin_seconds", &core::PipelineSpan::begin_seconds)
      .def_readonly("end_seconds", &core::PipelineSpan::end_seconds);

  py::class_<core::PipelineRun>(module, "PipelineRun")
      .def_readonly("seconds", &core::PipelineRun::seconds)
      .def_readonly("bubble", &core::PipelineRun::bubble)
      .def_readonly("end_seconds", &core::PipelineRun::end_seconds)
      .def_readonly("most_in_flight", &core::PipelineRun::most_in_flight)
      .def_readonly("spans", &core::PipelineRun::spans)
      .def_readonly("transfers", &core::PipelineRun::transfers);
}

void bindTables(py::module_& module) {
  module.def(
      "pipeline_depth_table",
      [](const std::vector<int>& depths, int microbatches) {
        return rowsOfTable(core::depthTable(depths, microbatches));
      },
      py::arg("depths"), py::arg("microbatches"));
  module.def(
      "pipeline_zero_bubble_table",
      [](const std::vector<core::StageTimes>& stages, const std::vector<int>& limits, int microbatches) {
        return rowsOfTable(withoutGil([&] { return zeroBubbleTable(stages, limits, microbatches); }));
      },
      py::arg("stages"), py::arg("limits"), py::arg("microbatches"));
  module.def(
      "pipeline_zero_bubble_class_table",
      [](int stages, int microbatches) { return rowsOfTable(core::zeroBubbleClassTable(stages, microbatches)); },
      py::arg("stages"), py::arg("microbatches"));
  module.def(
      "lower_pipeline_table",
      [](const TableRows& table) {
        return rowsOfTable(withoutGil([&] { return core::lowerTable(tableOfRows(table)); }));
      },
      py::arg("table"));
}

}  // namespace

void bindPipeline(py::module_& module) {
  bindPipelineInput(module);
  bindPipelinePlan(module);
  bindPipelineRun(module);
  bindTables(module);
  module.def("plan_pipeline", &core::planPipeline, py::arg("layers"), py::arg("link"), py::arg("options"),
             py::call_guard<py::gil_scoped_release>());
  module.def("pipeline_stage_times", &core::stageTimes, py::arg("layers"), py::arg("link"), py::arg("options"),
             py::arg("sizes"), py::arg("recompute") = std::vector<bool>(), py::call_guard<py::gil_scoped_release>());
  module.def(
      "simulate_pipeline",
      [](const std::vector<core::StageTimes>& stages, const TableRows& table, const std::string& mode,
         bool with_timeline) {
        return withoutGil([&] {
          return core::simulateTable(stages, tableOfRows(table), core::parsePipelineMode(mode), with_timeline);
        });
      },
      py::arg("stages"), py::arg("table"), py::arg("mode") = "ideal", py::arg("with_timeline") = false);
}

}  // namespace torchext
