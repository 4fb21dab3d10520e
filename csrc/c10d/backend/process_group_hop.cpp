#include "c10d/backend/process_group_hop.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "c10d/backend/living_backends.h"

namespace torchext {
namespace {

// What csrc/core refuses, as torch.distributed's error for a wrong option.
template <class Call>
auto asValueError(const char* prefix, Call call) {
  try {
    return call();
  } catch (const std::invalid_argument& error) {
    C10_THROW_ERROR(ValueError, c10::str(prefix, error.what()));
  }
}

core::CommunicationGraph ofNeighbours(const std::vector<std::vector<int>>& neighbours) {
  return asValueError("HopOptions.neighbours: ", [&] { return core::CommunicationGraph::fromNeighbours(neighbours); });
}

core::CommunicationGraph ofWeights(const std::vector<std::vector<double>>& weights) {
  return asValueError("HopOptions.weights: ", [&] { return core::CommunicationGraph::fromWeights(weights); });
}

}  // namespace

void ProcessGroupHop::Options::validate() const {
  checkEach(*this);
  asValueError("HopOptions.", [this] { core::validateHopMode(mode()); });
  TORCH_CHECK_VALUE(neighbours.empty() || weights.empty(), "HopOptions: neighbours and weights are both given, for ",
                    neighbours.size(), " and ", weights.size(),
                    " ranks; pass one of them (weights say who the neighbours are)");
  TORCH_CHECK_VALUE((neighbours.empty() && weights.empty()) || graph == Options().graph, "HopOptions.graph = \"", graph,
                    "\": allowed without ", neighbours.empty() ? "weights" : "neighbours",
                    ", which say what the graph is; leave one of them out");
  if (!neighbours.empty()) {
    ofNeighbours(neighbours);
  } else if (!weights.empty()) {
    ofWeights(weights);
  }
}

void ProcessGroupHop::Options::validate(int world_size) const {
  validate();
  const core::CommunicationGraph fitting = graphFor(world_size);
  asValueError("HopOptions.", [&] { core::validateHopMode(mode(), fitting); });
}

void ProcessGroupHop::Options::fit(int world_size) {
  const bool users_graph = !neighbours.empty() || !weights.empty();
  if (users_graph || (graph == "double-ring" && world_size % 2 != 0)) {
    graph = "ring-based";
    neighbours.clear();
    weights.clear();
  }
  const std::int64_t spare = graphFor(world_size).smallestInDegree() - 1;
  backup_workers = std::clamp<std::int64_t>(spare, 0, backup_workers);
  if (backup_workers == 0 && staleness == 0) {
    max_jump = 0;
    jump_trigger = 1;
  }
}

core::HopMode ProcessGroupHop::Options::mode() const {
  return {.notify_ack = notify_ack,
          .max_iteration_gap = static_cast<int>(max_iteration_gap),
          .backup_workers = static_cast<int>(backup_workers),
          .staleness = static_cast<int>(staleness),
          .max_jump = static_cast<int>(max_jump),
          .jump_trigger = static_cast<int>(jump_trigger)};
}

core::CommunicationGraph ProcessGroupHop::Options::graphFor(int world_size) const {
  const bool by_weights = !weights.empty();
  if (by_weights || !neighbours.empty()) {
    auto own = by_weights ? ofWeights(weights) : ofNeighbours(neighbours);
    TORCH_CHECK_VALUE(own.size() == world_size, "HopOptions.", by_weights ? "weights" : "neighbours",
                      " describes a graph of ", own.size(), " ranks, the group has ", world_size,
                      "; describe all of them, or name a built-in graph");
    return own;
  }
  return asValueError("HopOptions.graph: ",
                      [&] { return core::CommunicationGraph::builtIn(core::parseGraphKind(graph), world_size); });
}

ProcessGroupHop::ProcessGroupHop(int rank, int size, InnerBackends inner, c10::intrusive_ptr<Options> options)
    : AttachableBackend(rank, size, "hop", std::move(inner), options), hop_options_(std::move(options)) {
  hop_options_->validate(size);
}

ProcessGroupHop::~ProcessGroupHop() { ProcessGroupHop::shutdown(); }

c10::intrusive_ptr<c10d::Backend> ProcessGroupHop::createChild(int rank, int size, InnerBackends inner,
                                                               c10::intrusive_ptr<c10d::Backend::Options> options) {
  auto own = childOptions(*hop_options_, *options);
  own->fit(size);
  return makeBackend<ProcessGroupHop>(rank, size, std::move(inner), std::move(own));
}

}  // namespace torchext
