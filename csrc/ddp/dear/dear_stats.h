// DearStats counts what a model trained by DeAR does, since attach; times in milliseconds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/dear/bayesian_tuner.h"

namespace torchext {

struct DearStats {
  std::int64_t steps = 0;
  bool allreduce = false;        // trains as plain DDP at the moment
  bool decided = false;          // the search for the best plan is over
  double exposed_rs_ms = 0;      // the training thread waited for a reduce-scatter,
  double exposed_ag_ms = 0;      //   for an all-gather
  double rs_ms = 0;              // reduce-scatters were under way,
  double ag_ms = 0;              //   all-gathers
  double allreduce_step_ms = 0;  // median step of plain DDP when it was measured; 0: never
  std::int64_t bytes_sent = 0;
  std::int64_t staging_bytes = 0;
  std::size_t bucket_bytes = 0;          // limit of a bucket; 0: those of a plan
  std::vector<std::int64_t> buckets;     // bytes of each, in the order of the backward pass
  std::vector<core::TunerTrial> trials;  // of rank 0; elsewhere empty
};

}  // namespace torchext
