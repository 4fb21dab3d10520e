// strategy_search lists every way of synchronising gradients with its predicted step, and says why it is chosen or not.
//
//   StepProfile (the model) + LinkModel (the network) -> candidates, best first -> the chosen one
// Exact candidates: DDP with its default buckets (the reference), DDP with the program's buckets, dear sharded and dear
// replicated, and the last three with layers as rows. Inexact ones are listed beside them, and chosen only by name.
// Pure and deterministic, one thread; less than a second for 1,000 tensors.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "core/auto/gradient_buckets.h"
#include "core/auto/iteration_simulator.h"
#include "core/auto/link_model.h"
#include "core/auto/step_profile.h"

namespace torchext::core {

struct InexactWay {
  std::string way;    // "prague", "dssync" or "hop"
  std::string order;  // "cta": the average beside compute; "atc": after it. hop sends beside compute
  int partners = 2;   // members of a group; hop: neighbours that a rank sends to
  double rho = 0;     // of hop's graph (mixingRho); that of groups is computed
};

struct SearchOptions {
  std::vector<InexactWay> inexact = {};
  // "exact", or the way of an inexact candidate.
  std::string choose = "exact";
  // Repeats of calibration differ by this share: DDP stays unless the gain is above it, and above kLeastGain.
  double spread = 0;
  // Memory beside parameters, gradients and optimizer state; 0: no limit.
  double spare_bytes = 0;
  // DDP(gradient_as_bucket_view=True) copies no gradients.
  bool gradient_as_bucket_view = false;
  // Why a way cannot be: by "dear", "dear sharded", "dear replicated", "ddp program", "factors", "hop" ...
  std::map<std::string, std::string> refused = {};
};
inline constexpr double kLeastGain = 0.03;

struct Candidate {
  std::string way;                           // "ddp", "dear", or an inexact one
  std::string form;                          // ddp: "default", "program"; dear: "sharded", "replicated"; else the order
  int partners = 0;                          // of an inexact way
  Buckets buckets = {};                      // without the gradients of factor layers
  std::vector<std::string> algorithms = {};  // [bucket] dear's transport
  std::size_t direct_chunk_bytes = 0;        // dear's: larger chunks go by the ring
  std::vector<int> factor_layers = {};       // ascending
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

// Exact ones that are possible by step time, then the impossible, then the inexact by step time. The network has two
// ranks or more. std::invalid_argument on a bad profile or option.
std::vector<Candidate> searchStrategies(const StepProfile& profile, const LinkModel& link,
                                        const SearchOptions& options = {});

// The step of an exact candidate, with its timeline: also of one that another network or profile gave.
Iteration simulateCandidate(const StepProfile& profile, const LinkModel& link, const Candidate& candidate,
                            bool gradient_as_bucket_view = false, bool with_timeline = true);

}  // namespace torchext::core
