// A discrete-event model of Hop: workers on a communication graph compute, send, receive, reduce, take tokens, skip,
// through the real UpdateQueue and TokenQueue. Time is in iterations of a normal worker.
//
// The parallel form: a worker sends its model and computes at once; what it waits for is its own compute, then the
// neighbours' models, then tokens. Messages of an edge arrive in order, after random delays. While it runs it checks
// the token identity, the gap bounds and what is dequeued.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/hop/communication_graph.h"
#include "core/hop/hop_mode.h"

namespace torchext::core::testing {

struct HopSimulationOptions {
  HopMode mode = {};
  std::vector<double> slowdown = {};  // factor on a worker's compute time; empty: 1 for all
  double jitter = 0.0;                // compute time is uniform in 1 +- jitter, times the slowdowns
  double random_slowdown = 1.0;       // factor on the compute time of an iteration ...
  double slowdown_probability = 0.0;  // ... with this probability
  double message_time = 0.1;          // of a model
  double message_jitter = 0.0;        // uniform in 1 +- jitter, at most 1
  double store_time = 0.0;            // between admit and enqueue; mean, random
  double token_time = 0.0;            // of a token or an ACK; jittered like a model
  double reduce_time = 0.0;           // slots are held that long
  std::int64_t iterations = 0;        // each worker stops there; 0: at duration
  double duration = 0.0;
  std::uint64_t seed = 1;
};

struct HopSimulationResult {
  std::vector<std::int64_t> computed;  // gradients of each worker
  std::vector<std::int64_t> reached;   // iteration of each worker
  double time = 0.0;
  bool finished = true;        // false: deadlock
  std::string violation;       // the first one, with its numbers; empty: none
  std::int64_t tight = 0;      // pairs and moments at which a gap was equal to its bound
  std::int64_t skipped = 0;    // iterations jumped over
  std::int64_t held_back = 0;  // models that found their slot being read
};

// bounds: gapBounds(mode, graph).
HopSimulationResult simulateHop(const CommunicationGraph& graph, const std::vector<std::vector<int>>& bounds,
                                const HopSimulationOptions& options);

// [i][j]: largest Iter(i) - Iter(j).
std::vector<std::vector<int>> gapBounds(const HopMode& mode, const CommunicationGraph& graph);

}  // namespace torchext::core::testing
