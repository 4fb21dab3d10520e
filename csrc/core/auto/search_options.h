// SearchOptions is what a user allows the search, and what it cannot know of a model and a network.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace torchext::core {

struct InexactWay {
  std::string way;    // "prague", "dssync" or "hop"
  std::string order;  // "cta", hop's "parallel": the average beside compute; "atc", hop's "serial": after it
  int partners = 2;   // members of a group; hop: neighbours that a rank sends to
  double rho = 0;     // of hop's graph (mixingRho); that of groups is computed
};

struct SearchOptions {
  std::vector<InexactWay> inexact = {};
  // "exact", or the way of an inexact candidate.
  std::string choose = "exact";
  // Repeats of calibration differ by this share: DDP stays unless the gain is above kLeastGain even if its all-reduce
  // is faster by as much.
  double spread = 0;
  // Memory beside parameters, gradients and optimizer state; 0: no limit.
  double spare_bytes = 0;
  // DDP(gradient_as_bucket_view=True) copies no gradients.
  bool gradient_as_bucket_view = false;
  // Why a way cannot be: by "dear", "dear sharded", "dear hierarchical", "ddp program", "hop" ...; by "factors" beside
  // any way.
  std::map<std::string, std::string> refused = {};
};

}  // namespace torchext::core
