// Synchronizer: what torchext.attach() installs between a DistributedDataParallel model and a backend.
//
// Two kinds. AveragingSynchronizer: gradients stay local and parameters are averaged (prague, dssync, hop).
// DearSynchronizer (dear_synchronizer.h): gradients are reduced, as in plain DDP, at other moments. What both have, in
// a training step:
//
//   forward    a module's pre-hook calls waitTensors() with the parameters that it reads
//   backward   C++ hooks, no GIL
//   step       Python's optimizer hooks call beforeStep() and afterStep()
//
// Threads: the methods are called by the training thread; bytes move on a thread of the implementation. No method holds
// the GIL. An error of that thread is rethrown by the next call.
// Collective (all ranks, same order): the constructor, synchronize(), detach().
// In a forked child a synchronizer has no threads, and its connections are the parent's: what would use them throws
// c10::DistBackendError, leave() does nothing, and who would destroy it leaks it.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include <ATen/ATen.h>

namespace torchext {

class Synchronizer {
 public:
  virtual ~Synchronizer() = default;

  virtual void beforeStep() = 0;
  virtual void afterStep() = 0;
  // Returns once these tensors (positions in the constructor's list) hold what the next forward must see.
  virtual void waitTensors(const std::vector<std::int64_t>& tensors) = 0;
  virtual void waitAll() = 0;

  // The parameters (and averaged buffers) of all workers are the same, and complete, when it returns.
  virtual void synchronize() = 0;
  // Ends taking part, after everything owed to other workers is done. Safe twice.
  virtual void detach() = 0;
  // The same for at most `limit`, silent about failures: the process is on its way out.
  virtual void leave(std::chrono::milliseconds limit) = 0;

  virtual bool inForkedChild() const = 0;

  virtual std::int64_t steps() const = 0;
  virtual void setSteps(std::int64_t steps) = 0;
};

// Since attach; times in milliseconds.
struct AveragingStats {
  std::int64_t steps = 0;                            // optimizer steps
  std::int64_t averages = 0;                         // averages taken part in, with at least one other worker
  std::map<std::int64_t, std::int64_t> group_sizes;  // members -> averages
  double exposed_ms = 0;                             // the training thread waited for an average
  double generator_wait_ms = 0;                      // of the averaging thread: for the generator,
  double peer_wait_ms = 0;                           //   for the other members to arrive,
  double transfer_ms = 0;                            //   moving and adding bytes
  double copy_ms = 0;                                //   between parameters and buckets
  std::int64_t bytes_sent = 0;
  std::int64_t bytes_shared = 0;   // of averages that went through shared memory
  std::int64_t bucket_bytes = 0;   // memory of the averaging buckets
  std::int64_t iteration_gap = 0;  // averages behind the fastest worker, as of the last group
  double consensus_distance = 0;   // ||x - mean|| / ||mean|| of this worker at the last exact average
};

// Decentralized training: every worker steps with its own gradients, replicas are averaged.
class AveragingSynchronizer : public Synchronizer {
 public:
  // By LocalGradientHook, on autograd's thread: the last gradient of a backward pass is there.
  virtual void gradientsReady() = 0;
  // Collective. As synchronize(), remembering the local values; leaveAverage() (local) restores them.
  virtual void enterAverage() = 0;
  virtual void leaveAverage() = 0;
  // The group has taken the place of one that failed, and all have met in it: this worker has made `own` steps, the
  // furthest of them `furthest`.
  virtual void resume(std::int64_t own, std::int64_t furthest) = 0;
  virtual AveragingStats stats() const = 0;
};

}  // namespace torchext
