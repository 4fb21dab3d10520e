// Bindings of the K-FAC engine. No logic; every call that may block releases the GIL.
#include "python/bindings.h"

#include <pybind11/stl.h>

#include "c10d/backend/delegating_backend.h"
#include "core/base/enum_names.h"
#include "kfac/engine/kfac_engine.h"
#include "kfac/linalg/matrix_product.h"
#include "kfac/precondition/tiled_product.h"

namespace torchext {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;
using Kind = KfacLayerSpec::Kind;

constexpr core::EnumNames<Kind, 3> kKinds{
    {{Kind::kLinear, "linear"}, {Kind::kConvolution, "convolution"}, {Kind::kEmbedding, "embedding"}}};
constexpr core::EnumNames<core::FactorExchange, 3> kExchanges{{{core::FactorExchange::kAllReduce, "all-reduce"},
                                                               {core::FactorExchange::kReduceToOwner, "reduce"},
                                                               {core::FactorExchange::kOwnersOwn, "owner's own"}}};

KfacOptions makeKfacOptions(double damping, double factor_decay, bool martens_decay, std::optional<double> kl_clip,
                            int factor_update_steps, int inverse_update_steps, const std::string& method,
                            const std::string& factor_scaling, std::string strategy, double worker_fraction,
                            double bucket_cap_mb, std::optional<bool> split_directions,
                            const std::string& direction_precision, std::optional<bool> gather_rows, bool shared_memory,
                            bool queued) {
  KfacOptions options{damping,
                      factor_decay,
                      martens_decay,
                      kl_clip,
                      factor_update_steps,
                      inverse_update_steps,
                      core::parseEnum(kMethodNames, "method", method),
                      core::parseEnum(kScalingNames, "factor_scaling", factor_scaling),
                      std::move(strategy),
                      worker_fraction,
                      bucket_cap_mb,
                      split_directions,
                      core::parseEnum(kPrecisionNames, "direction_precision", direction_precision),
                      gather_rows,
                      shared_memory,
                      queued};
  options.validate();
  return options;
}

KfacLayerSpec makeLayer(std::string name, const std::string& kind, at::Tensor weight, std::optional<at::Tensor> bias,
                        std::vector<std::int64_t> stride, std::vector<std::int64_t> dilation,
                        std::vector<std::int64_t> pad_before, std::vector<std::int64_t> pad_after,
                        std::string padding_mode, std::int64_t groups, bool reduce_sequence, std::int64_t padding_idx) {
  return {std::move(name),         core::parseEnum(kKinds, "kind", kind),
          std::move(weight),       std::move(bias),
          std::move(stride),       std::move(dilation),
          std::move(pad_before),   std::move(pad_after),
          std::move(padding_mode), groups,
          reduce_sequence,         padding_idx};
}

py::dict kfacToDict(const KfacStats& stats) {
  py::dict result;
  result["steps"] = stats.steps;
  result["skipped"] = stats.skipped;
  result["factor_updates"] = stats.factor_updates;
  result["inverse_updates"] = stats.inverse_updates;
  result["factors_left_out"] = stats.factors_left_out;
  result["runs"] = stats.runs;
  result["runs_overlapped"] = stats.runs_overlapped;
  result["row_directions"] = stats.row_directions;
  result["row_directions_refused"] = stats.row_directions_refused;
  result["row_directions_ahead"] = stats.row_directions_ahead;
  result["clip"] = stats.clip;
  result["inverses_retried"] = stats.failures.retried;
  result["inverses_kept"] = stats.failures.kept;
  result["all_reduce_bytes"] = stats.bytes.all_reduce;
  result["reduce_bytes"] = stats.bytes.reduce;
  result["broadcast_bytes"] = stats.bytes.broadcast;
  result["sent_bytes"] = stats.bytes.sent;
  result["shared_bytes"] = stats.bytes.shared;
  result["memory_bytes"] = stats.memory_bytes;
  result["factor_seconds"] = stats.factor_seconds;
  result["exchange_wait_seconds"] = stats.exchange_wait_seconds;
  result["invert_seconds"] = stats.invert_seconds;
  result["distribute_seconds"] = stats.distribute_seconds;
  result["precondition_seconds"] = stats.precondition_seconds;
  return result;
}

py::dict planDict(const KfacEngine& engine) {
  const core::KfacPlan& plan = engine.planner().plan();
  const core::KfacCosts& costs = engine.planner().input().costs;
  const core::KfacPrediction predicted = engine.planner().prediction();
  py::list factors;
  int bucket = 0;
  for (std::size_t i = 0; i < plan.factors.size(); ++i) {
    bucket += plan.fusion_ends[static_cast<std::size_t>(bucket)] == static_cast<int>(i) ? 1 : 0;
    const FactorLayout& layout = engine.layouts()[i];
    py::dict factor;
    factor["layer"] = engine.layers()[static_cast<std::size_t>(layout.layer)].name;
    factor["side"] = layout.input_side ? "A" : "G";
    factor["dim"] = layout.dim;
    factor["count"] = layout.count;
    factor["diagonal"] = layout.diagonal;
    factor["exchange"] = core::enumName(kExchanges, "exchange", plan.factors[i].exchange);
    factor["owner"] = plan.factors[i].everyone_inverts ? -1 : plan.factors[i].owner;
    factor["workers"] = plan.workers[static_cast<std::size_t>(layout.layer)];
    factor["run"] = bucket;
    factors.append(factor);
  }
  py::dict result;
  result["strategy"] = core::kfacStrategyName(plan.strategy);
  result["ranks"] = plan.ranks;
  result["factors"] = factors;
  result["all_reduce"] = py::make_tuple(costs.all_reduce.alpha, costs.all_reduce.beta);
  result["broadcast"] = py::make_tuple(costs.broadcast.alpha, costs.broadcast.beta);
  result["sharing"] =
      costs.sharing ? py::object(py::make_tuple(costs.sharing->alpha, costs.sharing->beta)) : py::object(py::none());
  result["inversion"] = py::make_tuple(costs.inversion.fixed, costs.inversion.cubic);
  result["predicted_exchange_seconds"] = predicted.exchange;
  result["predicted_invert_seconds"] = predicted.invert;
  result["predicted_distribute_seconds"] = predicted.distribute;
  result["predicted_precondition_seconds"] = predicted.precondition;
  result["predicted_gradients_seconds"] = predicted.gradients;
  result["split_directions"] = plan.split_directions;
  result["tiles"] = engine.planner().usesTiles();
  result["row_layers"] = engine.rowLayers();
  return result;
}

using OptionalTensor = std::optional<at::Tensor>;
using StateTuple = std::tuple<at::Tensor, OptionalTensor, OptionalTensor>;

OptionalTensor optionalOf(const at::Tensor& tensor) { return tensor.defined() ? OptionalTensor(tensor) : std::nullopt; }

std::vector<StateTuple> saveState(KfacEngine& engine) {
  std::vector<StateTuple> result;
  for (const FactorState& state : engine.state()) {
    result.emplace_back(state.factor, optionalOf(state.matrix), optionalOf(state.values));
  }
  return result;
}

void loadState(KfacEngine& engine, const std::vector<StateTuple>& factors, std::int64_t steps,
               std::int64_t factor_updates) {
  std::vector<FactorState> state;
  state.reserve(factors.size());
  for (const auto& [factor, matrix, values] : factors) {
    state.push_back({factor, matrix.value_or(at::Tensor()), values.value_or(at::Tensor())});
  }
  engine.load(state, steps, factor_updates);
}

}  // namespace

void bindKfac(py::module_& module) {
  module.def("has_tiles", &TiledProduct::available);
  module.def("set_prefers_linear_products", &setPrefersLinearProducts, py::arg("answer").none(true));

  py::class_<KfacOptions>(module, "KfacOptions")
      .def(py::init(&makeKfacOptions), py::kw_only(), py::arg("damping"), py::arg("factor_decay"),
           py::arg("martens_decay"), py::arg("kl_clip").none(true), py::arg("factor_update_steps"),
           py::arg("inverse_update_steps"), py::arg("method"), py::arg("factor_scaling"), py::arg("strategy"),
           py::arg("worker_fraction"), py::arg("bucket_cap_mb"), py::arg("split_directions").none(true),
           py::arg("direction_precision"), py::arg("gather_rows").none(true), py::arg("shared_memory"),
           py::arg("queued"));

  py::class_<KfacLayerSpec>(module, "KfacLayer")
      .def(py::init(&makeLayer), py::kw_only(), py::arg("name"), py::arg("kind"), py::arg("weight"),
           py::arg("bias").none(true), py::arg("stride"), py::arg("dilation"), py::arg("pad_before"),
           py::arg("pad_after"), py::arg("padding_mode"), py::arg("groups"), py::arg("reduce_sequence"),
           py::arg("padding_idx"));

  py::class_<KfacEngine, std::shared_ptr<KfacEngine>>(module, "KfacEngine")
      .def(py::init([](std::vector<KfacLayerSpec> layers, KfacOptions options,
                       const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                       const c10::intrusive_ptr<DelegatingBackend>& model) {
             const py::gil_scoped_release no_gil;
             return std::make_shared<KfacEngine>(std::move(layers), std::move(options), group,
                                                 model ? model->health() : nullptr);
           }),
           py::arg("layers"), py::arg("options"), py::arg("group").none(true), py::arg("model").none(true))
      .def("forward", &KfacEngine::forward, py::arg("layer"), py::arg("input"), py::arg("outputs"))
      .def("step", &KfacEngine::step, py::arg("rates"), py::arg("others"), py::arg("loss_scale"),
           py::arg("gradient_scale"), py::arg("found_inf"), NoGil())
      .def("discard", &KfacEngine::discard, NoGil())
      .def_property(
          "damping", [](const KfacEngine& self) { return self.options().damping; },
          py::cpp_function(&KfacEngine::setDamping, py::is_method(py::none()), NoGil()))
      .def_property(
          "kl_clip", [](const KfacEngine& self) { return self.options().kl_clip; },
          py::cpp_function(&KfacEngine::setKlClip, py::is_method(py::none()), NoGil()))
      .def("plan", &planDict)
      .def("stats",
           [](const KfacEngine& self) {
             KfacStats stats;
             {
               const py::gil_scoped_release no_gil;  // some are counted on the device
               stats = self.stats();
             }
             return kfacToDict(stats);
           })
      .def("state", &saveState, NoGil())
      .def("load", &loadState, py::arg("factors"), py::arg("steps"), py::arg("factor_updates"), NoGil());
}

}  // namespace torchext
