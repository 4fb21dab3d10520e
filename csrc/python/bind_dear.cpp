// Bindings of the "dear" backend: options, process group, synchronizer. No logic; every call that may block releases
// the GIL.
#include "python/bind_group.h"
#include "python/bind_synchronizer.h"

#include <cmath>
#include <optional>
#include <string>
#include <utility>

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
                                             std::optional<DearPlan> planned,
                                             const DearSynchronizer::MakeDedicatedGroup& make_dedicated_group) {
  std::shared_ptr<DearSynchronizer> synchronizer(
      new DearSynchronizer(group, std::move(parameters), std::move(names), unused_allowed, bucket_mb,
                           std::move(planned), make_dedicated_group),
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

// A method of one of the two forms, as one of the synchronizer.
template <class Form, class Result, class... Arguments>
auto ofForm(Form& (DearSynchronizer::*form)(), Result (Form::*method)(Arguments...)) {
  return [form, method](DearSynchronizer& self, Arguments... arguments) -> Result {
    return ((self.*form)().*method)(std::forward<Arguments>(arguments)...);
  };
}

template <class Form, class Result, class... Arguments>
auto ofForm(Form& (DearSynchronizer::*form)(), Result (Form::*method)(Arguments...) const) {
  return [form, method](DearSynchronizer& self, Arguments... arguments) -> Result {
    return ((self.*form)().*method)(std::forward<Arguments>(arguments)...);
  };
}

}  // namespace

void bindDear(py::module_& module) {
  bindOptions<DearOptions>(module, kDearDoc);

  bindBackend<ProcessGroupDear>(module, "ProcessGroupDear")
      .def(py::init(
               [](int rank, int size, const InnerBackends& inner, const c10::intrusive_ptr<DearOptions>& options,
                  const std::string& name) { return makeBackend<ProcessGroupDear>(rank, size, inner, options, name); }),
           py::arg("rank"), py::arg("size"), py::arg("inner"), py::arg("options"), py::arg("name"), NoGil());

  py::class_<DearPlan>(module, "DearPlan")
      .def(py::init([](std::vector<std::int64_t> gradient_order, std::vector<int> ends,
                       std::vector<std::int64_t> forward_order, bool hierarchical) {
             DearPlan plan;
             plan.gradient_order = std::move(gradient_order);
             plan.ends = std::move(ends);
             plan.forward_order = std::move(forward_order);
             plan.hierarchical = hierarchical;
             return plan;
           }),
           py::kw_only(), py::arg("gradient_order"), py::arg("ends"), py::arg("forward_order"),
           py::arg("hierarchical") = false)
      .def_readonly("gradient_order", &DearPlan::gradient_order)
      .def_readonly("ends", &DearPlan::ends)
      .def_readonly("forward_order", &DearPlan::forward_order)
      .def_readonly("hierarchical", &DearPlan::hierarchical);

  py::class_<DearSynchronizer, Synchronizer, std::shared_ptr<DearSynchronizer>>(module, "DearSynchronizer")
      .def("expect_backward", &DearSynchronizer::expectBackward, py::arg("exchanges"), NoGil())
      .def("backward_begins", &DearSynchronizer::backwardBegins)
      .def("on_reduced", &DearSynchronizer::onReduced, py::arg("callback"))
      .def("adopt_plan", &DearSynchronizer::adoptPlan, NoGil())
      .def_property_readonly("allreduce", &DearSynchronizer::allreduce)
      .def_property_readonly("replicated", &DearSynchronizer::replicated)
      .def(
          "others_train_on", [](const DearSynchronizer& self) { return self.exchanges().othersTrainOn(); }, NoGil())
      .def("take_moved", &DearSynchronizer::takeMoved, NoGil())
      .def("clear_gradients", &DearSynchronizer::clearGradients, NoGil())
      .def_property_readonly("bucket_count",
                             [](const DearSynchronizer& self) { return self.exchanges().bucketCount(); })
      .def(
          "bucket_of",
          [](const DearSynchronizer& self, std::size_t parameter) { return self.exchanges().bucketOf(parameter); },
          py::arg("parameter"))
      // Of the sharded form:
      .def("on_accumulating", ofForm(&DearSynchronizer::shardedForm, &ShardedForm::onAccumulating), py::arg("callback"))
      .def("stepped", ofForm(&DearSynchronizer::shardedForm, &ShardedForm::stepped), py::arg("parameter"), NoGil())
      .def("own_gradient", ofForm(&DearSynchronizer::shardedForm, &ShardedForm::ownGradient), py::arg("parameter"),
           NoGil())
      .def("own_slice_of", ofForm(&DearSynchronizer::shardedForm, &ShardedForm::ownSliceOf), py::arg("parameter"),
           py::arg("whole"), NoGil())
      .def("arrived_buckets", ofForm(&DearSynchronizer::shardedForm, &ShardedForm::arrivedBuckets), py::arg("known"),
           NoGil())
      .def("note_lost_change", ofForm(&DearSynchronizer::shardedForm, &ShardedForm::noteLostChange))
      // Of the replicated form:
      .def("gradient", ofForm(&DearSynchronizer::replicatedForm, &ReplicatedForm::gradient), py::arg("parameter"),
           NoGil())
      .def("settle_gradient", ofForm(&DearSynchronizer::replicatedForm, &ReplicatedForm::settleGradient),
           py::arg("parameter"), NoGil())
      .def("stats", [](const DearSynchronizer& self) { return dearToDict(self.stats()); });

  module.def("attach_dear", &attachDear, py::arg("group"), py::arg("parameters"), py::arg("names"),
             py::arg("unused_allowed"), py::arg("bucket_mb") = std::nullopt, py::arg("planned") = std::nullopt,
             py::arg("make_dedicated_group") = DearSynchronizer::MakeDedicatedGroup(), NoGil());
}

}  // namespace torchext
