#include "kfac/comm/kfac_context.h"

#include <algorithm>
#include <utility>

namespace torchext {
namespace {

at::Device deviceOf(const std::vector<KfacLayerSpec>& layers) {
  TORCH_CHECK_VALUE(!layers.empty(), "torchext.optim: no layers");
  const at::Device device = layers.front().weight.device();
  for (const auto& layer : layers) {
    TORCH_CHECK_VALUE(layer.weight.device() == device, "torchext.optim: ", layers.front().name, " is on ", device, ", ",
                      layer.name, " on ", layer.weight.device(), "; all layers must be on one device");
  }
  return device;
}

}  // namespace

KfacContext::KfacContext(std::vector<KfacLayerSpec> the_layers, KfacOptions the_options,
                         const c10::intrusive_ptr<c10d::ProcessGroup>& group, std::shared_ptr<GroupHealth> model)
    : layers(std::move(the_layers)),
      options((the_options.validate(), std::move(the_options))),
      device(deviceOf(layers)),
      device_path(options.queued || !device.is_cpu()),
      exchange(group && group->getSize() > 1 ? std::make_unique<KfacExchange>(group, std::move(model)) : nullptr),
      rank(exchange ? exchange->rank() : 0),
      ranks(exchange ? exchange->size() : 1) {}

double KfacContext::decay() const {
  if (!options.martens_decay) {
    return options.decay;
  }
  return std::min(1.0 - 1.0 / static_cast<double>(counters.factor_updates + 1), options.decay);
}

at::Tensor KfacContext::ofAllRanks(const at::Tensor& own, int tag) {
  if (!exchange) {
    return own.unsqueeze(0);
  }
  at::Tensor all = at::empty({ranks, own.numel()}, own.options());
  all.select(0, rank).copy_(own);
  if (throughMemory()) {
    exchange->gatherParts(all.unbind());
  } else {
    auto works = exchange->gather(all, tag);
    KfacExchange::wait(works);
  }
  return all;
}

}  // namespace torchext
