// HopStats counts what a worker trained by Hop does, since attach; times in milliseconds.
#pragma once

#include <cstdint>
#include <map>

namespace torchext {

using Histogram = std::map<std::int64_t, std::int64_t>;  // value -> how often

struct HopStats {
  std::int64_t steps = 0;     // optimizer steps
  std::int64_t averages = 0;  // averages with at least one other worker
  std::int64_t skipped = 0;   // iterations jumped over
  Histogram group_sizes;      // models in an average, the own one included
  Histogram gaps;             // on entering an iteration: it less an in-neighbour's, as its messages tell
  Histogram ages;             // of the other workers' models taken: own iteration less the model's
  std::map<int, int> tokens;  // by out-neighbour: those left now; none without tokens, or when it has left
  std::int64_t too_late = 0;  // models that arrived when their iteration had passed
  std::int64_t not_sent = 0;  // models whose receiver had passed their iteration before they went out
  std::int64_t waits = 0;     // times the training thread waited
  double model_wait_ms = 0;   //   for models,
  double token_wait_ms = 0;   //   for tokens or acknowledgements,
  double send_wait_ms = 0;    //   for memory of models that are still being sent
  double copy_ms = 0;         // of the training thread: packing and averaging
  std::int64_t bytes_sent = 0;
  std::int64_t slot_bytes = 0;    // memory of the models that can be held
  double consensus_distance = 0;  // ||x - mean|| / ||mean|| of this worker at the last exact average
};

}  // namespace torchext
