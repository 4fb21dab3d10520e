// Bindings of sufficient factors: the exchange of rows, and the layers' forward passes. No logic.
#include "python/bind_group.h"
#include "python/bind_synchronizer.h"

#include "core/base/enum_names.h"
#include "ddp/factors/factor_embedding.h"
#include "ddp/factors/factor_linear.h"

namespace torchext {
namespace {

constexpr core::EnumNames<FactorLayer::Kind, 2> kLayerKinds{
    {{FactorLayer::Kind::kLinear, "linear"}, {FactorLayer::Kind::kEmbedding, "embedding"}}};

}  // namespace

void bindFactors(py::module_& module) {
  py::class_<FactorLayer>(module, "FactorLayer")
      .def(py::init([](std::string name, const std::string& kind, at::Tensor weight,
                       const std::optional<at::Tensor>& bias, std::int64_t padding, std::int64_t places) {
             return FactorLayer{std::move(name),
                                std::move(weight),
                                bias.value_or(at::Tensor()),
                                places,
                                core::parseEnum(kLayerKinds, "kind", kind),
                                padding};
           }),
           py::kw_only(), py::arg("name"), py::arg("kind"), py::arg("weight"), py::arg("bias") = py::none(),
           py::arg("padding") = -1, py::arg("places"));

  py::class_<SufficientFactors, std::shared_ptr<SufficientFactors>>(module, "SufficientFactors")
      .def(py::init([](const c10::intrusive_ptr<AttachableBackend>& group, std::vector<FactorLayer> layers) {
             return std::shared_ptr<SufficientFactors>(new SufficientFactors(group, std::move(layers)),
                                                       DeleteWithoutGil());
           }),
           py::arg("group"), py::arg("layers"), NoGil())
      .def("expect", &SufficientFactors::expect, py::arg("averages"), NoGil())
      .def("backward_begins", &SufficientFactors::backwardBegins, NoGil())
      .def("linear", &factorLinear, py::arg("layer"), py::arg("input"), py::arg("weight"), py::arg("bias"), NoGil())
      .def("embedding", &factorEmbedding, py::arg("layer"), py::arg("indices"), py::arg("weight"), NoGil())
      .def("stats", [](const SufficientFactors& self) {
        const SufficientFactors::Stats stats = [&self] {
          const py::gil_scoped_release release;  // who holds its lock may need the interpreter's
          return self.stats();
        }();
        py::dict result;
        result["steps"] = stats.steps;
        result["early_messages"] = stats.early;
        result["reductions"] = stats.reductions;
        result["row_bytes"] = stats.row_bytes;
        return result;
      });
}

}  // namespace torchext
