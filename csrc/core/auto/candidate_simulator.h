// candidate_simulator plays the step of a way of synchronising gradients: which messages it sends for a model, what
// each takes on a network, and what is computed besides.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "core/auto/gradient_buckets.h"
#include "core/auto/iteration_simulator.h"
#include "core/auto/link_model.h"
#include "core/auto/step_profile.h"

namespace torchext::core {

struct Candidate {
  std::string way;                      // "ddp", "dear", or an inexact one
  std::string form;                     // ddp: "default", "program"; dear: "sharded", "replicated"; else the order
  int partners = 0;                     // of an inexact way
  Buckets buckets = {};                 // without the gradients of factor layers
  std::string algorithm = {};           // dear's transport, one of the link's
  std::vector<int> factor_layers = {};  // ascending
  double step_seconds = 0;
  double compute_seconds = 0;  // of the slowest rank, with the optimizer
  double exposed_reduce_seconds = 0;
  double exposed_gather_seconds = 0;
  double extra_bytes = 0;  // memory
  bool exact = true;
  double rho = 0;
  bool possible = true;  // false: no times
  bool chosen = false;
  std::string reason = {};  // "chosen", or why not
};

class CandidateSimulator {
 public:
  // Compute is that of the slowest of all ranks. link outlives this. std::invalid_argument on a profile or a network
  // that cannot be.
  CandidateSimulator(const StepProfile& profile, const LinkModel& link, bool gradient_as_bucket_view = false);

  const StepProfile& profile() const { return profile_; }  // of the slowest rank
  const LinkModel& link() const { return link_; }

  // An exact candidate.
  Iteration run(const Candidate& exact, bool with_timeline = false) const;

  // What run() counts with:
  ComputeSpans computeOf(const Candidate& exact) const;
  // When gradients can leave: DDP copies each into its bucket first, in the backward pass.
  std::vector<Gradient> gradientsOf(const Candidate& exact) const;
  // Of a bucket on the link. dear also packs and unpacks it there, on the thread that sends.
  double reduceSeconds(const Candidate& exact, std::size_t bytes) const;
  double gatherSeconds(const Candidate& exact, std::size_t bytes) const;  // 0 for DDP

 private:
  bool ddpCopies(const Candidate& exact) const;
  double copySeconds(std::size_t bytes) const;
  BucketMessage bucketMessage(const Candidate& exact, const std::vector<Gradient>& gradients,
                              const std::vector<int>& bucket) const;
  BucketMessage rowsMessage(const Candidate& exact, int layer) const;

  StepProfile profile_;
  const LinkModel& link_;
  bool gradient_as_bucket_view_;
};

// The step with its timeline, of a candidate that may come from elsewhere: its positions are checked first.
Iteration simulateCandidate(const StepProfile& profile, const LinkModel& link, const Candidate& candidate,
                            bool gradient_as_bucket_view = false);

}  // namespace torchext::core
