// HopRanksTest runs a body on the ranks of a hop group, and makes what an exchange or a mailbox begins with.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>

#include "c10d/backend/process_group_hop.h"
#include "ddp/hop/hop_worker_state.h"
#include "kit/ranks_as_threads.h"

namespace torchext::kit {

inline c10::intrusive_ptr<AttachableBackend> attachable(ProcessGroupHop& group) {
  return c10::intrusive_ptr<AttachableBackend>::reclaim_copy(&group);
}

inline HopSetup hopSetup(const ProcessGroupHop& group, core::GraphKind graph, const core::HopMode& mode,
                         std::size_t model_bytes, std::uint64_t digest = 7) {
  return {.graph = core::CommunicationGraph::builtIn(graph, group.getSize()),
          .mode = mode,
          .model_bytes = model_bytes,
          .digest = digest,
          .channel = 0};
}

class HopRanksTest : public RanksTest {
 protected:
  // body(group, rank)
  template <class Body>
  void onHopGroups(const World& world, const Body& body, milliseconds timeout = seconds(30)) {
    onGroups<ProcessGroupHop>(world, ProcessGroupHop::Options(timeout), body);
  }
};

}  // namespace torchext::kit
