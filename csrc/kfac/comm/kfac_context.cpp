#include "kfac/comm/kfac_context.h"

#include <algorithm>
#include <string>
#include <utility>

#include "kfac/comm/device_communicator.h"
#include "kfac/comm/memory_communicator.h"

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

std::vector<std::string> describeLayers(const std::vector<KfacLayerSpec>& layers) {
  std::vector<std::string> texts;
  texts.reserve(layers.size());
  for (const auto& layer : layers) {
    texts.push_back(c10::str(layer.name.empty() ? "the model itself" : layer.name, ", weight ", layer.weight.sizes(),
                             layer.bias ? " and bias" : "", ", groups ", layer.groups));
  }
  return texts;
}

AgreementFields fieldsOf(const std::vector<KfacLayerSpec>& layers, const KfacOptions& options, at::Device device) {
  return {
      {"layers", describeLayers(layers)},
      {"factor_update_steps", options.factor_update_steps},
      {"inverse_update_steps", options.inverse_update_steps},
      {"strategy", options.strategy},
      {"method", core::enumName(kMethodNames, "method", options.form)},
      {"factor_scaling", core::enumName(kScalingNames, "factor_scaling", options.scaling)},
      {"factor_decay", options.decay},
      {"martens_decay", options.martens_decay},
      {"damping", options.damping},
      {"kl_clip", options.kl_clip},
      {"worker_fraction", options.worker_fraction},
      {"bucket_cap_mb", options.bucket_cap_mb},
      {"split_directions", options.split_directions},
      {"direction_precision", core::enumName(kPrecisionNames, "direction_precision", options.precision)},
      {"gather_rows", options.gather_rows},
      {"shared_memory", options.shared_memory},
      {"the type of the device", c10::DeviceTypeName(device.type(), /*lower_case=*/true)},
  };
}

// Chosen once, alike on all ranks.
std::unique_ptr<Communicator> connect(const KfacContext& context, const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                      std::shared_ptr<GroupHealth> model) {
  if (!group || group->getSize() == 1) {
    return nullptr;
  }
  const AgreementFields fields = fieldsOf(context.layers, context.options, context.device);
  if (context.on_device) {
    auto device = std::make_unique<DeviceCommunicator>(group, std::move(model), context.device);
    device->agree(fields);
    return device;
  }
  auto messages = std::make_unique<MessageCommunicator>(group, std::move(model));
  messages->agree(fields);
  if (context.options.shared_memory) {
    if (auto windows = messages->shareMemory()) {
      return std::make_unique<MemoryCommunicator>(std::move(*messages), std::move(windows));
    }
  }
  return messages;
}

}  // namespace

KfacContext::KfacContext(std::vector<KfacLayerSpec> the_layers, KfacOptions the_options,
                         std::unique_ptr<Communicator> the_comm)
    : layers(std::move(the_layers)),
      options((the_options.validate(), std::move(the_options))),
      device(deviceOf(layers)),
      on_device(options.queued || !device.is_cpu()),
      comm(std::move(the_comm)),
      rank(comm ? comm->rank() : 0),
      ranks(comm ? comm->size() : 1) {}

KfacContext::KfacContext(std::vector<KfacLayerSpec> the_layers, KfacOptions the_options,
                         const c10::intrusive_ptr<c10d::ProcessGroup>& group, std::shared_ptr<GroupHealth> model)
    : KfacContext(std::move(the_layers), std::move(the_options), nullptr) {
  comm = connect(*this, group, std::move(model));
  rank = comm ? comm->rank() : 0;
  ranks = comm ? comm->size() : 1;
}

double KfacContext::decay() const {
  if (!options.martens_decay) {
    return options.decay;
  }
  return std::min(1.0 - 1.0 / static_cast<double>(counters.factor_updates + 1), options.decay);
}

}  // namespace torchext
