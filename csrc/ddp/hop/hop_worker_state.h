// HopWorkerState holds what the training thread of a Hop worker and the lines to its neighbours share, under one lock.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <mutex>

#include "c10d/backend/attachable_backend.h"
#include "core/hop/communication_graph.h"
#include "core/hop/hop_messages.h"
#include "core/hop/hop_mode.h"
#include "ddp/hop/hop_slots.h"
#include "ddp/hop/hop_stats.h"

namespace torchext {

struct HopSetup {
  core::CommunicationGraph graph;  // of more than one rank
  core::HopMode mode;
  std::size_t model_bytes = 0;
  std::uint64_t digest = 0;  // the same on all ranks
  int channel = 0;           // of the group
};

struct HopWorkerState {
  HopWorkerState(c10::intrusive_ptr<AttachableBackend> backend, HopSetup options);

  // All with the mutex held. fail(): ends all waits; the first error stays.
  void fail(const std::exception_ptr& reason);
  bool ended() const { return stopping || error; }
  // From this worker, in this session.
  core::HopMessage header(core::HopMessage::Kind kind, std::int64_t tag) const;

  const c10::intrusive_ptr<AttachableBackend> group;
  const HopSetup setup;
  const int rank;

  mutable std::mutex mutex;                        // guards what follows
  std::condition_variable changed;                 // the training thread waits here,
  std::condition_variable slots_free;              //   receiving threads here,
  std::map<int, std::condition_variable> to_send;  //   sending ones here, by neighbour; the map itself never changes
  HopSlots slots;
  std::uint64_t session = 0;
  std::int64_t iteration = 0;                        // in this session
  std::chrono::steady_clock::time_point progress{};  // when the last message came, or draining began
  bool draining = false;
  bool stopping = false;
  std::exception_ptr error;
  HopStats stats;
};

}  // namespace torchext
