// DelegatingBackend: a c10d::Backend that holds inner backends and forwards every ordinary collective to them, exactly.
//
// What it is
//   The common base of ProcessGroupPrague (and later Hop, DSSync, DeAR). A tensor's device picks the inner backend:
//   Gloo for CPU, NCCL for CUDA. On top of what the inner backends do it adds what they lack (shared fault model):
//     * a poisoned state: the first failure fixes the reason; every later call throws it at once, buffers untouched;
//     * a FailureMonitor on a control group of its own, so that a dead peer is named on every rank within a second;
//     * abort() that ends pending waits in < 0.1 s, from any thread; shutdown() bounded to 2 s; both safe twice;
//     * a fork guard: calls in a forked child throw, its destructor detaches.
//
// Ownership and threads
//   The inner backends are built in Python (the wheel ships no Gloo headers) and owned here. Works returned to callers
//   are DelegatingWorks: their wait() watches the inner work and the poisoned state. No method holds the GIL.
//
// Call order: construct on every rank (collective, the inner groups connect) -> collectives -> shutdown() or abort().
#pragma once

#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace torchext {

// The groups a backend stands on, all of the same ranks in the same order.
struct InnerBackends {
  c10::intrusive_ptr<c10d::Backend> cpu;      // Gloo; never null
  c10::intrusive_ptr<c10d::Backend> cuda;     // NCCL; null when torch has no CUDA or no GPU is visible
  c10::intrusive_ptr<c10d::Backend> control;  // Gloo of its own, practically unlimited timeout: liveness, generator
};

}  // namespace torchext
