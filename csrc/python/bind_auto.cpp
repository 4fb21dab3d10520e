// Bindings of csrc/core/auto: plain values in, plain values out. No logic; the search releases the GIL.
#include "python/bindings.h"

#include <utility>

#include <pybind11/stl.h>

#include "core/auto/consensus.h"
#include "core/auto/step_samples.h"
#include "core/auto/strategy_search.h"
#include "core/base/enum_names.h"
#include "core/hop/communication_graph.h"

namespace torchext {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;
using Pairs = std::vector<std::pair<std::size_t, double>>;
using Numbers = std::vector<std::vector<double>>;

constexpr core::EnumNames<core::LayerRows::Kind, 2> kLayerKinds{
    {{core::LayerRows::Kind::kLinear, "linear"}, {core::LayerRows::Kind::kEmbedding, "embedding"}}};

core::CostTable tableOf(const Pairs& pairs) {
  std::vector<core::CostPoint> points;
  points.reserve(pairs.size());
  for (const auto& [nbytes, seconds] : pairs) {
    points.push_back({nbytes, seconds});
  }
  return core::CostTable(std::move(points));
}

Pairs pairsOf(const core::CostTable& table) {
  Pairs pairs;
  for (const auto& [bytes, seconds] : table.points()) {
    pairs.emplace_back(bytes, seconds);
  }
  return pairs;
}

core::Network makeNetwork(int ranks, double latency_seconds, double bytes_per_second, int ranks_per_host,
                          double inside_latency_seconds, double inside_bytes_per_second) {
  const core::Network network{
      ranks, {latency_seconds, bytes_per_second}, ranks_per_host, {inside_latency_seconds, inside_bytes_per_second}};
  core::checkNetwork(network);
  return network;
}

core::StepProfile makeProfile(std::vector<double> forward_seconds, double backward_seconds,
                              std::vector<core::Gradient> gradients, double optimizer_seconds,
                              std::vector<core::LayerRows> layers, Numbers step_samples) {
  core::StepProfile profile{std::move(forward_seconds), backward_seconds,  optimizer_seconds,
                            std::move(gradients),       std::move(layers), std::move(step_samples)};
  core::checkProfile(profile);
  return profile;
}

Numbers hopWeights(const std::string& name, int ranks) {
  const auto graph = core::CommunicationGraph::builtIn(core::parseGraphKind(name), ranks);
  Numbers weights(core::index(ranks), std::vector<double>(core::index(ranks)));
  for (int from = 0; from < ranks; ++from) {
    for (int to = 0; to < ranks; ++to) {
      weights[core::index(from)][core::index(to)] = graph.weight(from, to);
    }
  }
  return weights;
}

void bindLink(py::module_& module) {
  py::class_<core::CostTable>(module, "CostTable")
      .def(py::init(&tableOf), py::arg("points"))
      .def("__eq__",
           [](const core::CostTable& self, const core::CostTable& other) { return self.points() == other.points(); })
      .def_property_readonly("points", &pairsOf)
      .def("seconds", &core::CostTable::seconds, py::arg("nbytes"));

  py::class_<core::Network>(module, "Network")
      .def(py::init(&makeNetwork), py::kw_only(), py::arg("ranks"), py::arg("latency_seconds"),
           py::arg("bytes_per_second"), py::arg("ranks_per_host") = 1, py::arg("inside_latency_seconds") = 0.0,
           py::arg("inside_bytes_per_second") = 0.0)
      .def_readonly("ranks", &core::Network::ranks)
      .def_property_readonly("latency_seconds", [](const core::Network& self) { return self.link.latency_seconds; })
      .def_property_readonly("bytes_per_second", [](const core::Network& self) { return self.link.bytes_per_second; })
      .def_readonly("ranks_per_host", &core::Network::ranks_per_host)
      .def_property_readonly("inside_latency_seconds",
                             [](const core::Network& self) { return self.inside.latency_seconds; })
      .def_property_readonly("inside_bytes_per_second",
                             [](const core::Network& self) { return self.inside.bytes_per_second; });

  py::class_<core::Transport>(module, "Transport")
      .def(py::init([](const std::string& algorithm, core::CostTable reduce_scatter, core::CostTable all_gather) {
             return core::Transport{core::parseAlgorithm(algorithm), std::move(reduce_scatter), std::move(all_gather)};
           }),
           py::kw_only(), py::arg("algorithm"), py::arg("reduce_scatter"), py::arg("all_gather"))
      .def_property_readonly("algorithm", [](const core::Transport& self) { return core::toString(self.algorithm); })
      .def_readonly("reduce_scatter", &core::Transport::reduce_scatter)
      .def_readonly("all_gather", &core::Transport::all_gather);

  py::class_<core::LinkModel>(module, "LinkTables")
      .def(py::init<core::Network, core::CostTable, std::vector<core::Transport>, std::optional<core::CostTable>,
                    double, double>(),
           py::kw_only(), py::arg("network"), py::arg("all_reduce"),
           py::arg("transports") = std::vector<core::Transport>(), py::arg("rows") = std::nullopt,
           py::arg("copy_bytes_per_second") = 0.0, py::arg("operations_per_second") = 0.0)
      .def_readonly("network", &core::LinkModel::network)
      .def_readonly("all_reduce", &core::LinkModel::all_reduce)
      .def_readonly("transports", &core::LinkModel::transports)
      .def_readonly("rows", &core::LinkModel::rows)
      .def_readonly("copy_bytes_per_second", &core::LinkModel::copy_bytes_per_second)
      .def_readonly("operations_per_second", &core::LinkModel::operations_per_second)
      .def("on", &core::LinkModel::on, py::arg("network"));
}

void bindProfile(py::module_& module) {
  py::class_<core::LayerRows>(module, "LayerRows")
      .def(py::init([](const std::string& kind, std::size_t rows, std::size_t height, std::size_t width,
                       std::size_t element_bytes) {
             return core::LayerRows{core::parseEnum(kLayerKinds, "kind", kind), rows, height, width, element_bytes};
           }),
           py::kw_only(), py::arg("kind"), py::arg("rows"), py::arg("height"), py::arg("width"),
           py::arg("element_bytes") = 4)
      .def_property_readonly("kind",
                             [](const core::LayerRows& self) { return core::enumName(kLayerKinds, "kind", self.kind); })
      .def_readonly("rows", &core::LayerRows::rows)
      .def_readonly("height", &core::LayerRows::height)
      .def_readonly("width", &core::LayerRows::width)
      .def_readonly("element_bytes", &core::LayerRows::element_bytes)
      .def_property_readonly("row_nbytes", &core::rowBytes)
      .def("fewest_rows_to_reduce", &core::fewestRowsToReduce, py::arg("ranks"));

  py::class_<core::Gradient>(module, "Gradient")
      .def(py::init<std::size_t, double, int, int, int>(), py::kw_only(), py::arg("nbytes"), py::arg("ready_seconds"),
           py::arg("first_use") = -1, py::arg("kind") = 0, py::arg("layer") = -1)
      .def_readonly("nbytes", &core::Gradient::bytes)
      .def_readonly("ready_seconds", &core::Gradient::ready_seconds)
      .def_readonly("first_use", &core::Gradient::first_use)
      .def_readonly("kind", &core::Gradient::kind)
      .def_readonly("layer", &core::Gradient::layer);

  py::class_<core::StepProfile>(module, "StepProfile")
      .def(py::init(&makeProfile), py::kw_only(), py::arg("forward_seconds"), py::arg("backward_seconds"),
           py::arg("gradients"), py::arg("optimizer_seconds") = 0.0, py::arg("layers") = std::vector<core::LayerRows>(),
           py::arg("step_samples") = Numbers())
      .def_readonly("forward_seconds", &core::StepProfile::forward_seconds)
      .def_readonly("backward_seconds", &core::StepProfile::backward_seconds)
      .def_readonly("optimizer_seconds", &core::StepProfile::optimizer_seconds)
      .def_readonly("gradients", &core::StepProfile::gradients)
      .def_readonly("layers", &core::StepProfile::layers)
      .def_readonly("step_samples", &core::StepProfile::step_samples);
}

void bindCandidate(py::module_& module) {
  py::class_<core::Candidate>(module, "Candidate")
      .def(py::init<std::string, std::string, int, core::Buckets, std::string, std::vector<int>, double, double, double,
                    double, double, bool, double, bool, bool, std::string>(),
           py::kw_only(), py::arg("way"), py::arg("form"), py::arg("partners") = 0,
           py::arg("buckets") = core::Buckets(), py::arg("algorithm") = "",
           py::arg("factor_layers") = std::vector<int>(), py::arg("step_seconds") = 0.0,
           py::arg("compute_seconds") = 0.0, py::arg("exposed_reduce_seconds") = 0.0,
           py::arg("exposed_gather_seconds") = 0.0, py::arg("extra_nbytes") = 0.0, py::arg("exact") = true,
           py::arg("rho") = 0.0, py::arg("possible") = true, py::arg("chosen") = false, py::arg("reason") = "")
      .def_readonly("way", &core::Candidate::way)
      .def_readonly("form", &core::Candidate::form)
      .def_readonly("partners", &core::Candidate::partners)
      .def_readonly("buckets", &core::Candidate::buckets)
      .def_readonly("algorithm", &core::Candidate::algorithm)
      .def_readonly("factor_layers", &core::Candidate::factor_layers)
      .def_readonly("step_seconds", &core::Candidate::step_seconds)
      .def_readonly("compute_seconds", &core::Candidate::compute_seconds)
      .def_readonly("exposed_reduce_seconds", &core::Candidate::exposed_reduce_seconds)
      .def_readonly("exposed_gather_seconds", &core::Candidate::exposed_gather_seconds)
      .def_readonly("extra_nbytes", &core::Candidate::extra_bytes)
      .def_readonly("exact", &core::Candidate::exact)
      .def_readonly("rho", &core::Candidate::rho)
      .def_readonly("possible", &core::Candidate::possible)
      .def_readonly("chosen", &core::Candidate::chosen)
      .def_readonly("reason", &core::Candidate::reason);

  py::class_<core::TimelineSpan>(module, "TimelineSpan")
      .def_property_readonly("activity", [](const core::TimelineSpan& self) { return core::toString(self.activity); })
      .def_readonly("item", &core::TimelineSpan::item)
      .def_readonly("begin_seconds", &core::TimelineSpan::begin_seconds)
      .def_readonly("end_seconds", &core::TimelineSpan::end_seconds);

  py::class_<core::Iteration>(module, "Iteration")
      .def_readonly("step_seconds", &core::Iteration::step_seconds)
      .def_readonly("exposed_reduce_seconds", &core::Iteration::exposed_reduce_seconds)
      .def_readonly("exposed_gather_seconds", &core::Iteration::exposed_gather_seconds)
      .def_readonly("timeline", &core::Iteration::timeline);
}

void bindSearch(py::module_& module) {
  py::class_<core::InexactWay>(module, "InexactWay")
      .def(py::init<std::string, std::string, int, double>(), py::kw_only(), py::arg("way"), py::arg("order"),
           py::arg("partners"), py::arg("rho") = 0.0);

  py::class_<core::SearchOptions>(module, "SearchOptions")
      .def(py::init<std::vector<core::InexactWay>, std::string, double, double, bool,
                    std::map<std::string, std::string>>(),
           py::kw_only(), py::arg("inexact") = std::vector<core::InexactWay>(), py::arg("choose") = "exact",
           py::arg("spread") = 0.0, py::arg("spare_nbytes") = 0.0, py::arg("gradient_as_bucket_view") = false,
           py::arg("refused") = std::map<std::string, std::string>());

  module.def("search_strategies", &core::searchStrategies, py::arg("profile"), py::arg("link"),
             py::arg_v("options", core::SearchOptions(), "SearchOptions()"), NoGil());
  module.def("simulate_candidate", &core::simulateCandidate, py::arg("profile"), py::arg("link"), py::arg("candidate"),
             py::arg("gradient_as_bucket_view") = false, NoGil());
}

}  // namespace

void bindAuto(py::module_& module) {
  bindLink(module);
  bindProfile(module);
  bindCandidate(module);
  bindSearch(module);
  module.def(
      "collective_seconds",
      [](const std::string& algorithm, const core::Network& network, double nbytes) {
        return core::allReduceSeconds(core::parseAlgorithm(algorithm), network, nbytes);
      },
      py::arg("algorithm"), py::arg("network"), py::arg("nbytes"));
  module.def("group_rho", &core::groupRho, py::arg("ranks"), py::arg("group"));
  module.def("mixing_rho", &core::mixingRho, py::arg("weights"), NoGil());
  module.def("hop_weights", &hopWeights, py::arg("graph"), py::arg("ranks"));
  module.def(
      "apart_ranks", [](const Numbers& step_samples) { return core::StepSamples(step_samples).apartRanks(); },
      py::arg("step_samples"));
}

}  // namespace torchext
