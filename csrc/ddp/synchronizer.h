// Synchronizer: what torchext.attach() installs between a DistributedDataParallel model and a backend.
//
// One interface for every decentralized backend. The data's path in a training step:
//
//   backward   the reducer calls gradientsReady() through LocalGradientHook (C++, no GIL); gradients stay local
//   step       Python's optimizer hooks call beforeStep() and afterStep()
//   forward    a module's pre-hook calls waitBucket(i) for the buckets its parameters live in
//
// Threads: the methods are called by the training thread (gradientsReady: by autograd's); averaging runs on a thread
// of the implementation. No method holds the GIL. An error of that thread is rethrown by the next call.
// Collective (all ranks, same order): the constructor, synchronize(), enterAverage(), detach().
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <ATen/ATen.h>

namespace torchext {

// Since attach; times in milliseconds.
struct SynchronizerStats {
  std::int64_t steps = 0;                            // optimizer steps
  std::int64_t averages = 0;                         // averages taken part in, with at least one other worker
  std::map<std::int64_t, std::int64_t> group_sizes;  // members -> averages
  double exposed_ms = 0;                             // the training thread waited for an average
  double generator_wait_ms = 0;                      // of the averaging thread: for the generator,
  double peer_wait_ms = 0;                           //   for the other members to arrive,
  double transfer_ms = 0;                            //   moving and adding bytes
  double copy_ms = 0;                                //   between parameters and buckets
  std::int64_t bytes_sent = 0;
  std::int64_t bucket_bytes = 0;   // memory of the averaging buckets
  std::int64_t iteration_gap = 0;  // averages behind the fastest worker, as of the last group
  double consensus_distance = 0;   // ||x - mean|| / ||mean|| of this worker at the last exact average
};

class Synchronizer {
 public:
  virtual ~Synchronizer() = default;

  virtual void gradientsReady() = 0;
  virtual void beforeStep() = 0;
  virtual void afterStep() = 0;
  virtual void waitBucket(std::size_t bucket) = 0;
  virtual void waitAll() = 0;

  // The parameters and floating-point buffers of all workers become their exact average.
  virtual void synchronize() = 0;
  // The same, remembering the local values; leaveAverage() (local) restores them.
  virtual void enterAverage() = 0;
  virtual void leaveAverage() = 0;
  // Ends taking part, after everything promised to other workers has been done. Safe twice.
  virtual void detach() = 0;
  // The same for at most `limit`, silent about failures: the process is on its way out.
  virtual void leave(std::chrono::milliseconds limit) = 0;

  virtual SynchronizerStats stats() const = 0;
  virtual std::int64_t steps() const = 0;
  virtual void setSteps(std::int64_t steps) = 0;
  // bucketOf()[i]: the bucket of the i-th tensor given to the constructor.
  virtual const std::vector<std::int64_t>& bucketOf() const = 0;
};

}  // namespace torchext
