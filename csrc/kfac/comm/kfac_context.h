// KfacContext holds what all parts of the engine share: layers, options, the device, the ranks, and the count of steps.
//
// Factors lie in the order in which the backward pass comes to layers: of each layer G, of its outputs, then A, of its
// inputs. All ranks count steps together, so that what a step is to do is the same on all of them.
//
// The engine owns it, and it outlives the parts. Threads: the turn guards what changes, which are counters, damping and
// kl_clip; K-FAC's own threads read none of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "c10d/fault/group_health.h"
#include "kfac/base/kfac_counters.h"
#include "kfac/base/kfac_layer.h"
#include "kfac/base/kfac_options.h"
#include "kfac/base/reentrancy_guard.h"
#include "kfac/comm/communicator.h"

namespace torchext {

struct KfacContext {
  // Collective: all ranks must agree on layers and options. Throws std::invalid_argument for an option, c10::ValueError
  // for layers on several devices. group, model: as the engine's.
  KfacContext(std::vector<KfacLayerSpec> the_layers, KfacOptions the_options,
              const c10::intrusive_ptr<c10d::ProcessGroup>& group, std::shared_ptr<GroupHealth> model);

  // The same over ranks that agree already; comm: null for one rank.
  KfacContext(std::vector<KfacLayerSpec> the_layers, KfacOptions the_options, std::unique_ptr<Communicator> the_comm);

  std::vector<KfacLayerSpec> layers;
  KfacOptions options;
  at::Device device;
  bool on_device;                      // the arithmetic is that of an accelerator, and queued
  std::unique_ptr<Communicator> comm;  // null: one rank
  int rank = 0;
  int ranks = 1;
  KfacCounters counters;
  EngineTurn turn;

  int layerCount() const { return static_cast<int>(layers.size()); }
  const KfacLayerSpec& layer(int number) const { return layers[static_cast<std::size_t>(number)]; }
  // Of a layer; the other one follows.
  std::size_t firstFactor(int number) const { return 2 * (layers.size() - 1 - static_cast<std::size_t>(number)); }
  // Whether what this rank makes may leave, while it makes more.
  bool overlaps() const { return !comm || comm->overlaps(); }

  // Of the step under way.
  bool updatesFactors() const { return counters.steps % options.factor_update_steps == 0; }
  bool updatesInverses() const { return counters.steps % options.inverse_update_steps == 0; }
  bool sendsFactors() const { return comm && updatesInverses(); }
  double decay() const;
};

}  // namespace torchext
